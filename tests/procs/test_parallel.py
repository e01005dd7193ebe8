"""Layers that the devices of a worker compute together: the bits of one worker of as many devices."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import python
from launches import Launches, launches

pytestmark = pytest.mark.procs

SCRIPT = str(Path(__file__).parent / "scripts" / "parallel.py")
TWO = {"UNISONO_DEVICES_PER_WORKER": "2"}


def trained(output: str) -> list[str]:
    """What the script has printed: digest, last loss, error on all data."""
    return next(line.split()[-3:] for line in output.splitlines() if "trained " in line)


@pytest.fixture(scope="module")
def launched() -> Iterator[Launches]:
    with launches({**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"}) as found:
        yield found


@pytest.fixture(scope="module")
def alone(launched: Launches, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one worker of two devices trains."""
    return trained(launched(2, SCRIPT, folder=tmp_path_factory.mktemp("alone") / "run", **TWO))


@pytest.mark.parametrize("workers", [pytest.param(each, marks=pytest.mark.slow) for each in (2, 3, 5)])
def test_workers_of_two_devices_train_the_bits_of_one_worker_of_two(
    workers: int, alone: list[str], launched: Launches, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    assert trained(launched(2 * workers, SCRIPT, folder=tmp_path / "run", HELD=str(held), **TWO)) == alone
    each = [int((tmp_path / f"held-{rank}").read_text()) for rank in range(2)]
    assert each == [31 * 12 + 2 * 12 + 3 * (2 * 24 + 3 * 6 * 13 + 12 * 6 + 12 + 21 * 13 + 12 * 21 + 12)] * 2


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_as_many_devices_and_is_refused_with_others(
    alone: list[str], launched: Launches, tmp_path: Path
) -> None:
    told = {"UNISONO_STOP_AFTER": "3", "UNISONO_CHECKPOINT_EVERY": "2", **TWO}
    assert trained(launched(2, SCRIPT, folder=tmp_path / "run", **told)) != alone
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert trained(launched(4, SCRIPT, folder=tmp_path / "run", **TWO)) == alone
    done = python("-m", "unisono", "run", "-n", "1", "--run-dir", tmp_path / "other", SCRIPT)
    assert "devices of run.parallelize: 1 here, 2 there" in done.stdout + done.stderr
    assert "--allow-job-change" in done.stdout + done.stderr


@pytest.mark.slow
def test_what_cannot_be_computed_together_is_refused_with_the_cure(launched: Launches, tmp_path: Path) -> None:
    said = launched(2, SCRIPT, "refused", folder=tmp_path / "run", **TWO)
    begins = [
        "ModelError: run.parallelize: no parameter lies in parts by the plan of up",
        "JobError: run.parallelize: the model is spread over devices already",
        "ModelError: optimizer.group0.0 belongs to no module: make the optimizer after run.parallelize",
        "JobError: run.pipeline and run.parallelize in one script",
    ]
    lines = [line.removeprefix("[rank 0] ") for line in said.splitlines() if "Error: " in line]
    assert [line for line, begin in zip(lines, begins, strict=True) if not line.startswith(begin)] == []
    elastic = ("run", "-n", "1:2", "--devices-per-worker", "2", "--run-dir", tmp_path / "elastic")
    done = python("-m", "unisono", *elastic, SCRIPT)
    assert "where the loss of another worker cannot wake them: start workers that stay" in done.stdout + done.stderr
