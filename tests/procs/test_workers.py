"""Several workers together: what they share, what they refuse, and what happens when one is lost."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from commands import completed
from serial_runs import SerialRuns

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("warm"),
]

SCRIPTS = Path(__file__).parent / "scripts"


def words(workers: int, script: Path, folder: Path) -> list[str]:
    return ["run", "-n", str(workers), "--run-dir", str(folder), str(script)]


def finished(workers: int, script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return completed(*words(workers, script, folder), timeout=120)


@contextmanager
def started(workers: int, script: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "unisono", *words(workers, script, folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# -- together ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    done = finished(3, SCRIPTS / "together.py", tmp_path_factory.mktemp("together") / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in re.findall(r"FOUND (.*)", done.stdout)]


def test_all_workers_find_the_same(findings: list[dict[str, Any]]) -> None:
    assert len(findings) == 3
    assert findings[0] == findings[1] == findings[2]


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("sum", 6),
        ("mean", 1.0),
        ("max", [2, 0]),
        ("min", [0, -2]),
        ("broadcast", 1),
        ("broadcast tensor", [[2.0, 2.0], [2.0, 2.0]]),
        ("weight after prepare", 0.0),
        ("predictions in order", True),
        ("three samples", [0.0, 2.0, 4.0]),
        ("mean of all", 24.5),
    ],
)
def test_collective_verbs_give_every_worker_the_value_of_all(
    verb: str, expected: Any, findings: list[dict[str, Any]]
) -> None:
    assert findings[0][verb] == expected


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("other data set", "(?s)rank 1 has another data set than rank 0.*number of samples: 40 here, 41 there"),
        (
            "other model",
            r"(?s)rank 2 has another model than rank 0.*weight: float32\[1, 1\] here, float32\[2, 1\] there",
        ),
        ("nan", r"NonFiniteLoss: step 0: the loss is nan in shard 5 \(rank 2\)"),
        ("other metrics", r"DataError: metrics returned \['from 1'\] for one batch and \['from 0'\] for another"),
        ("other job", "(?s)rank 1 has another job or machine than rank 0.*job.batch_size: 24 here, 25 there"),
    ],
)
def test_workers_that_differ_are_refused_by_all_with_rank_field_and_values(
    what: str, message: str, findings: list[dict[str, Any]]
) -> None:
    assert re.search(message, findings[0][what])


def test_a_model_built_from_unseeded_numbers_is_warned_of(findings: list[dict[str, Any]]) -> None:
    (warning,) = findings[0]["warnings of the main worker"]
    assert "Build the model after unisono.init" in warning


# -- losing a worker --------------------------------------------------------------------------------------------------

ENDLESS = """
import os, torch, unisono
from torch import nn
from torch.utils.data import TensorDataset
run = unisono.init(batch_size=16, shards=4, seed=1, faults={"timeout_s": 60})
model = nn.Linear(4, 4)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
print("PID", os.getpid(), flush=True)
for step in run.steps(TensorDataset(torch.ones(1600, 4)), epochs=EPOCHS):
    step.run(lambda model, batch: model(batch[0]).pow(2).mean())
    if step.number == 20:
        run.print("TRAINING", flush=True)
run.finish()
"""


def script_with(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def pids_of(process: subprocess.Popen[str], workers: int) -> dict[int, int]:
    """Read until every worker has said its process id and the steps are under way; returns them by rank."""
    assert process.stdout is not None
    pids: dict[int, int] = {}
    for line in process.stdout:
        if said := re.search(r"\[rank (\d+)\] PID (\d+)", line):
            pids[int(said[1])] = int(said[2])
        if "TRAINING" in line and len(pids) == workers:
            return pids
    raise AssertionError(f"the workers ended early: {pids}")


@pytest.mark.alone
def test_a_killed_worker_ends_the_job_within_two_seconds_and_is_named(tmp_path: Path) -> None:
    script = script_with(tmp_path, ENDLESS.replace("EPOCHS", "1000000"))
    with started(3, script, tmp_path / "run") as process:
        pids = pids_of(process, 3)
        os.kill(pids[1], signal.SIGKILL)
        killed = monotonic()
        assert process.stdout is not None
        output = process.stdout.read()
        code = process.wait(timeout=10)
        assert monotonic() - killed < 2.0  # a promise of the launcher, not a measurement
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert code == 137
    assert re.search(r"rank 1 .*SIGKILL", output.splitlines()[-1] + output)
    assert result["exit_code"] == 137
    assert result["error"]["rank"] == 1
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


@pytest.mark.slow
def test_a_job_that_is_asked_to_leave_writes_a_checkpoint_and_goes_on_later_to_the_same_bits(
    serial_runs: SerialRuns, tmp_path: Path
) -> None:
    six_epochs = script_with(tmp_path, ENDLESS.replace("EPOCHS", "6"))
    with started(3, six_epochs, tmp_path / "run") as process:
        pids_of(process, 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 75
        assert process.stdout is not None
        command = shlex.join([sys.executable, "-m", "unisono", *words(3, six_epochs, tmp_path / "run")])
        assert f"unisono: to go on: {command}\n" in process.stdout.read()
    interrupted = json.loads((tmp_path / "run" / "result.json").read_text())
    resumed = finished(2, six_epochs, tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 20 < interrupted["steps"] < result["steps"] == 600
    assert result["weights_sha256"] == serial_runs(six_epochs).end()


def test_the_worker_whose_script_failed_is_the_one_whose_traceback_is_printed_last(tmp_path: Path) -> None:
    text = ENDLESS.replace("EPOCHS", "3").replace(
        "    if step.number == 20:",
        "    if step.number == 5 and run.rank == 2:\n        raise RuntimeError('mine')\n    if 0:",
    )
    done = finished(3, script_with(tmp_path, text), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1] == "RuntimeError: mine"
    assert (result["exit_code"], result["error"]["rank"]) == (1, 2)


def test_more_workers_than_shards_are_a_mistake_in_usage(tmp_path: Path) -> None:
    script = script_with(tmp_path, "import unisono\nunisono.init(batch_size=16, shards=2)\n")
    done = finished(3, script, tmp_path / "run")
    assert done.returncode == 2
    assert "set shards=4" in done.stderr.rstrip().splitlines()[-1]
