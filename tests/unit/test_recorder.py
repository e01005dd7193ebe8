"""The main worker writes a line for each step, also the one that it takes over from a lost one."""

import json
from pathlib import Path

import pytest

from unisono.checkpoint.folder import RunFolder
from unisono.train.record.metrics_line import Recorder

pytestmark = pytest.mark.unit


def end_step(recorder: Recorder, step: int) -> None:
    recorder.step_loaded()
    recorder.step_ran()
    recorder.step_ends({"step": step, "loss": 1.0 + step, "seconds": {}}, samples=8)


def steps_in(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_whoever_is_not_the_main_worker_writes_nothing_and_knows_the_newest_line(folder: RunFolder) -> None:
    other = Recorder(folder, writes=False)
    end_step(other, 3)
    assert other.latest["step"] == 3
    assert not (folder.path / "metrics.jsonl").exists()


@pytest.mark.parametrize("written", [2, 3])
def test_a_main_worker_that_is_lost_before_or_after_its_line_leaves_every_step_once(
    folder: RunFolder, written: int
) -> None:
    lost, other = Recorder(folder, writes=True), Recorder(folder, writes=False)
    for step in range(3):
        end_step(other, step)
    for step in range(written):
        end_step(lost, step)
    folder.metrics.close()
    other.take_over()
    end_step(other, 3)
    folder.close()
    assert steps_in(folder) == [0, 1, 2, 3]


def test_a_line_of_a_step_that_the_new_main_worker_has_yet_to_end_is_written_by_it(folder: RunFolder) -> None:
    lost, other = Recorder(folder, writes=True), Recorder(folder, writes=False)
    end_step(other, 0)
    for step in range(2):
        end_step(lost, step)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # it was killed while it wrote
    folder.metrics.close()
    other.take_over()
    end_step(other, 1)
    folder.close()
    assert steps_in(folder) == [0, 1]
