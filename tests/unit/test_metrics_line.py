"""The main worker writes a line for each step, also the one that it takes over from a lost one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from unisono.checkpoint.folder import RunFolder
from unisono.train.record.metrics_line import MetricsLine
from unisono.train.step.listeners import Computed

pytestmark = pytest.mark.unit

OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=0.1)


class Worker:
    """A worker that trains, and may become the main one."""

    def __init__(self, folder: RunFolder, *, is_main: bool) -> None:
        generation = SimpleNamespace(number=0)
        self._membership = SimpleNamespace(
            is_main=is_main, workers=SimpleNamespace(generation=generation, world_size=2)
        )
        trained = SimpleNamespace(policy_state=SimpleNamespace(is_empty=True))
        self.metrics = MetricsLine(folder, cast("Any", trained), cast("Any", self._membership))

    def end_step(self, number: int) -> None:
        step: Any = SimpleNamespace(
            number=number, epoch=0, position=0, size=8, is_last_in_epoch=False, curvature=dict[str, float]()
        )
        self.metrics.step_begins(step)
        self.metrics.call_done(step, [OPTIMIZER], Computed(1.0 + number, {}, {}, {}, samples=8))
        self.metrics.finish(step, {})

    def take_over(self) -> None:
        self._membership.is_main = True
        self.metrics.renewed()


def steps_in(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_whoever_is_not_the_main_worker_writes_nothing_and_knows_the_newest_line(folder: RunFolder) -> None:
    other = Worker(folder, is_main=False)
    other.end_step(3)
    assert other.metrics.latest["step"] == 3
    assert not (folder.path / "metrics.jsonl").exists()


@pytest.mark.parametrize("written", [2, 3])
def test_a_main_worker_that_is_lost_before_or_after_its_line_leaves_every_step_once(
    folder: RunFolder, written: int
) -> None:
    lost, other = Worker(folder, is_main=True), Worker(folder, is_main=False)
    for step in range(3):
        other.end_step(step)
    for step in range(written):
        lost.end_step(step)
    folder.metrics.close()
    other.take_over()
    other.end_step(3)
    folder.close()
    assert steps_in(folder) == [0, 1, 2, 3]


def test_a_line_of_a_step_that_the_new_main_worker_has_yet_to_end_is_written_by_it(folder: RunFolder) -> None:
    lost, other = Worker(folder, is_main=True), Worker(folder, is_main=False)
    other.end_step(0)
    for step in range(2):
        lost.end_step(step)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # it was killed while it wrote
    folder.metrics.close()
    other.take_over()
    other.end_step(1)
    folder.close()
    assert steps_in(folder) == [0, 1]
