"""A policy cuts batches finer and coarser on real workers, over each transport: bits are those of the serial run.

Any number of workers, kills at all kinds of places, and runs that go on: ``tests/unit/test_finer_batches.py``.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import outcomes
from commands import completed
from serial_runs import SerialRuns
from unisono_lab.faults.samples import Samples, problems

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm")]

SCRIPT = Path(__file__).parent / "scripts" / "finer.py"
SHARDS = 6
"""Of the job."""

OF_THIS_RUN = ("generation", "world_size", "seconds", "samples_per_s", "workers", "links", "setting", "time", "shard_s")
"""What lines of metrics say of the workers, and not of the job."""

Outcome = tuple[str, dict[int, Any], list[Any]]


def start(folder: Path, *options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return outcomes.train(folder, *options, script=SCRIPT, settings={"UNISONO_SAMPLES": "1", **settings})


def train(folder: Path, *options: str, **settings: str) -> Outcome:
    """The digest of the weights, the metrics of each step, and what was decided when."""
    ended = start(folder, *options, **settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return outcome_in(folder)


def outcome_in(folder: Path) -> Outcome:
    digest = json.loads((folder / "result.json").read_text())["weights_sha256"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = {line["step"]: {name: line[name] for name in line if name not in OF_THIS_RUN} for line in lines}
    decided = {json.dumps({**one, "time": 0}) for one in journal(folder, "decided")}
    return digest, metrics, sorted(map(json.loads, decided), key=lambda one: (one["step"], one["verb"]))


def journal(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


@pytest.fixture(scope="session")
def serial(serial_runs: SerialRuns) -> tuple[Outcome, Samples]:
    folder = serial_runs(SCRIPT, UNISONO_SAMPLES="1").run_dir
    return outcome_in(folder), Samples.read(folder)


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(
            3,
            {"OPTIONS": '{"faults": {"verify_every": 3}, "communication": {"overlap": true}}', "LOADERS": "1"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            {"OPTIONS": '{"communication": {"transport": "sockets", "topology": "ring", "overlap": true}}'},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_decides_no_bit_decides_none_while_the_number_of_shards_changes(
    workers: int, settings: dict[str, str], serial: tuple[Outcome, Samples], tmp_path: Path
) -> None:
    assert train(tmp_path / "run", "-n", f"{workers}", **settings) == serial[0]


@pytest.mark.slow  # workers that are threads show it in each suite
def test_weights_metrics_and_decisions_are_the_same_while_workers_come_and_die(
    serial: tuple[Outcome, Samples], tmp_path: Path
) -> None:
    faults, folder = tmp_path / "faults.toml", tmp_path / "run"
    kills = [(4, 0), (8, 1), (13, 0), (16, 1), (20, 0), (25, 1)]  # at boundaries where the shards change, and others
    faults.write_text(
        "".join(f"[[fault]]\nkind = 'kill'\nrank = {r}\nat_step = {s}\nafter_s = 0.002\n" for s, r in kills)
    )
    options = ("-n", "1:4", "--max-restarts", "20", "--faults", str(faults))
    told = '{"communication": {"transport": "sockets", "balance": "speed"}}'
    assert train(folder, *options, OPTIONS=told) == serial[0]
    assert len(journal(folder, "lost")) >= 3
    assert len({len(one["shards"]) for one in journal(folder, "minted")}) > 1  # some joined
    assert problems(Samples.read(folder), len(serial[0][1]), SHARDS, serial[1]) == []


@pytest.mark.slow
def test_verify_finds_the_same_bits(tmp_path: Path) -> None:
    words = ("verify", "--workers", "1,3", "--steps", "10", SCRIPT)
    ended = completed(*words, timeout=outcomes.PATIENCE_S, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "identical" in ended.stdout
