"""Workers that never take part, whatever is wrong with them, neither end a job nor change a bit of its weights."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forks.commands import ForkedCommand, start
from serial_runs import SerialRuns
from training import PATIENCE_S, SCRIPT, Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

RIGHT = SCRIPT.read_text()

WRONG = {
    "raises": ("raise ImportError('no such module')", "ImportError: no such module"),
    "ends": ("pass", "its script ended before the others'"),
    "other_shards": (RIGHT.replace("shards=8", "shards=4"), "the job has 8 shards, but 4 on host"),
}
"""What scripts do, and what their launchers say of it."""

SETTINGS: Any = {"EPOCHS": "12", "PACE_S": "0.2"}
"""Of the job, which trains until it is told to hurry."""

UNABLE = {**SETTINGS, "UNISONO_PLUGINS": "unable:begin"}
"""Of a joiner that is taken in, and fails over the state that it is given."""


class Joining:
    """Launchers that join a job."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._started: list[ForkedCommand | subprocess.Popen[bytes]] = []
        self.output = folder / "joining.txt"

    def __call__(self, script: Path, **settings: str) -> "ForkedCommand | subprocess.Popen[bytes]":
        words = ("join", "--run-dir", str(self._training.run_dir), str(script))
        with self.output.open("wb") as output:
            process = start(*words, env={**os.environ, **settings}, stdout=output, stderr=subprocess.STDOUT)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def long(serial_runs: SerialRuns) -> Trained:
    """The undisturbed run of one worker."""
    return serial_runs(SCRIPT, PACE_S="0", EPOCHS=SETTINGS["EPOCHS"])


@pytest.fixture
def training(started: list[Training], tmp_path: Path) -> Training:
    """Two workers that train until they are told to hurry; two more have room."""
    options = ("-n", "2:4", "--here", "2", "--max-restarts", "0")
    started.append(Training(tmp_path / "run", *options, **SETTINGS))
    started[0].until_step(1)
    return started[0]


@pytest.fixture
def joining(training: Training, tmp_path: Path) -> Iterator[Joining]:
    found = Joining(training, tmp_path)
    yield found
    found.close()


@pytest.mark.slow
def test_wrong_joiners_end_with_their_error_and_the_job_with_the_bits_of_the_serial_run(
    long: Trained, training: Training, joining: Joining, tmp_path: Path
) -> None:
    joiners: list[tuple[Path, str, dict[str, str]]] = []
    for name, (script, words) in WRONG.items():
        joiners.append((tmp_path / f"{name}.py", words, {}))
        joiners[-1][0].write_text(script)
    joiners.append((SCRIPT, "checkpoints.every: None here, 2 there", {"UNISONO_CHECKPOINT_EVERY": "2"}))
    joiners.append((SCRIPT, "MemoryError: no room for the state", UNABLE))
    for path, words, settings in joiners:
        assert joining(path, **settings).wait(PATIENCE_S) == 1, (path, training.output.read_text())
        said = joining.output.read_text()
        assert words in said, path
        assert "the job goes on without w" in said, path
        assert words in training.journal("excluded")[-1]["why"], path
    training.hurry()
    assert training.end() == long.end()
    assert len(training.journal("excluded")) == len(joiners)
    assert training.steps == long.steps
    assert json.loads((training.run_dir / "result.json").read_text())["exit_code"] == 0
