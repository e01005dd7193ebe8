"""A job whose main host has no room left on the disk of its run folder: it trains on, and nothing is lost."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from serial_runs import SerialRuns
from training import PATIENCE_S, SCRIPT, Trained, Training, control_of
from unisono.jsonl import read_lines

pytestmark = [
    pytest.mark.procs,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="to mount a small disk needs root"),
]

SETTINGS: Any = {"EPOCHS": "40", "PACE_S": "0.1"}


class Disk:
    """A small file system of its own.

    Args:
        folder: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self) -> None:
        """Leave no byte."""
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def clear(self) -> None:
        """There is room again."""
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "run"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], check=False).returncode:  # noqa: S607
        pytest.skip("NO MOUNT: this kernel makes no small disk for us")
    yield Disk(folder)
    subprocess.run(["umount", "--lazy", folder], check=True)  # noqa: S607


@pytest.fixture(scope="session")
def undisturbed(serial_runs: SerialRuns) -> Trained:
    """The run of one worker."""
    return serial_runs(SCRIPT, **SETTINGS | {"PACE_S": "0"})


def test_a_job_trains_on_while_the_disk_is_full_and_loses_a_worker_and_writes_again_when_there_is_room(
    disk: Disk, started: list[Training], undisturbed: Trained
) -> None:
    options = ("-n", "2:3", "--here", "2", "--max-restarts", "3", "--checkpoint-every", "4")
    started.append(training := Training(disk.folder, *options, **SETTINGS))
    training.until_so(lambda: bool(_checkpoints(disk)), "a checkpoint")
    disk.fill()
    lost, reached = "w2", _reached(training)
    os.kill(training.pid_of(lost), signal.SIGKILL)

    def goes_on() -> bool:
        now = _reached(training)
        return lost not in now and len(now) == len(reached) and min(now.values()) > max(reached.values()) + 8

    training.until_so(goes_on, "a generation with another worker, and some steps of it")
    newest = _checkpoints(disk)[-1]
    disk.clear()
    training.until_so(lambda: _checkpoints(disk)[-1] > newest, "a checkpoint after that")
    training.hurry()
    assert training.end() == undisturbed.end()
    steps = {line["step"] for line in read_lines(disk.folder / "metrics.jsonl") if "loss" in line}
    assert steps < set(undisturbed.steps), "the disk was full, and has no lines of those steps"
    assert "No space left on device" in training.output.read_text()


def test_a_coordinator_that_finds_no_room_to_start_again_ends_the_job_with_the_reason(
    disk: Disk, started: list[Training]
) -> None:
    started.append(training := Training(disk.folder, "-n", "2:3", "--here", "2", **SETTINGS))
    training.until_step(1)
    disk.fill()
    os.kill(training.coordinator, signal.SIGKILL)
    assert training.process.wait(PATIENCE_S) == 1
    assert f"no room is left on the disk of {disk.folder}/logs; make some" in training.output.read_text()


def _reached(training: Training) -> dict[str, int]:
    """By worker, the step that the coordinator knows of."""
    return {one["id"]: one["step"] or 0 for one in control_of(training.run_dir).status()["members"]}


def _checkpoints(disk: Disk) -> list[str]:
    return sorted(path.name for path in (disk.folder / "checkpoints").glob("step-*"))
