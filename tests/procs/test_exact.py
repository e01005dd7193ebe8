"""The promise: one job, one bit pattern, on any number of workers."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "scripts" / "exact_jobs.py"
WORKERS = (1, 2, 3, 5, 8)


def launch(workers: int, *arguments: str, folder: Path, **variables: str) -> str:
    """Run a script to its end on so many workers; returns what they printed."""
    command = [sys.executable, "-m", "unisono", "run", "-n", str(workers), "--run-dir", str(folder), *arguments]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::unisono.errors.UnisonoWarning", **variables}
    done = subprocess.run(
        command, cwd=folder.parent, env=environment, check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[Any]]]:
    """For each number of workers and each job, what every worker reported."""
    found: dict[int, dict[str, list[Any]]] = {}
    for workers in WORKERS:
        output = launch(workers, str(JOBS), folder=tmp_path_factory.mktemp("exact") / "run")
        reports = [json.loads(line) for line in re.findall(r"RESULT (.*)", output)]
        found[workers] = {report["job"]: [] for report in reports}
        for report in reports:
            found[workers][report["job"]].append(report)
    return found


@cache
def job_names() -> list[str]:
    return re.findall(r"@job\ndef (\w+)", JOBS.read_text())


@pytest.mark.parametrize("job", job_names())
def test_every_worker_of_any_number_ends_with_the_same_bits(job: str, results: dict[int, dict[str, list[Any]]]) -> None:
    serial = results[1][job][0]
    for workers in WORKERS:
        assert len(results[workers][job]) == workers
        assert all(report == serial for report in results[workers][job]), f"{workers} workers"


def test_another_seed_other_shards_or_another_batch_size_give_other_bits(
    results: dict[int, dict[str, list[Any]]],
) -> None:
    names = ("batch_norm_dropout_tied_unused", "another_seed", "other_shards", "another_batch_size")
    assert len({results[1][name][0]["digest"] for name in names}) == len(names)


def test_the_size_of_buckets_changes_no_bit(results: dict[int, dict[str, list[Any]]]) -> None:
    whole, small = results[3]["batch_norm_dropout_tied_unused"][0], results[3]["small_buckets"][0]
    assert small["digest"] == whole["digest"]


def test_loader_processes_change_no_bit_of_random_augmentation(results: dict[int, dict[str, list[Any]]]) -> None:
    inside, outside = (
        results[2][name][0]["digest"]
        for name in ("random_augmentation_in_this_process", "random_augmentation_in_loader_processes")
    )
    assert inside == outside
