"""Workers that never take part, whatever is wrong with them, neither end a job nor change a bit of its weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from commands import completed
from serial_runs import SerialRuns
from training import PATIENCE_S, SCRIPT, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.slow]

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


def test_wrong_joiners_end_with_their_error_and_the_job_with_the_bits_of_the_serial_run(
    serial_runs: SerialRuns, started: list[Training], tmp_path: Path
) -> None:
    options = ("-n", "2:4", "--here", "2", "--max-restarts", "0")
    started.append(training := Training(tmp_path / "run", *options, **SETTINGS))
    training.until_step(1)
    joiners: list[tuple[Path, str, dict[str, str]]] = []
    for name, (script, words) in WRONG.items():
        joiners.append((tmp_path / f"{name}.py", words, {}))
        joiners[-1][0].write_text(script)
    joiners.append((SCRIPT, "checkpoints.every: None here, 2 there", {"UNISONO_CHECKPOINT_EVERY": "2"}))
    joiners.append((SCRIPT, "MemoryError: no room for the state", UNABLE))
    for path, words, settings in joiners:
        told = {**os.environ, **settings}
        done = completed("join", "--run-dir", training.run_dir, path, env=told, timeout=PATIENCE_S, is_merged=True)
        assert done.returncode == 1, (path, training.output.read_text())
        assert words in done.stdout, path
        assert "the job goes on without w" in done.stdout, path
        assert words in training.journal("excluded")[-1]["why"], path
    training.hurry()
    long = serial_runs(SCRIPT, PACE_S="0", EPOCHS=SETTINGS["EPOCHS"])
    assert training.end() == long.end()
    assert len(training.journal("excluded")) == len(joiners)
    assert training.steps == long.steps
    assert json.loads((training.run_dir / "result.json").read_text())["exit_code"] == 0
