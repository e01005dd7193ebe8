"""Whatever goes wrong with the membership, the job comes to its end, and the bits stay.

A failing seed is in the test's message; `World(seed, folder).play()` brings it back.
"""

import os
import tempfile
from pathlib import Path

import pytest

from simulation.world import World
from unisono.membership.messages import JobOver
from unisono.membership.state import State

pytestmark = pytest.mark.cluster

SCHEDULES = int(os.environ.get("UNISONO_SCHEDULES", "120"))


def outcome(over: JobOver) -> str:
    return "done" if over.digest else "preempted" if over.preempted else "failed"


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_goes_wrong_the_job_comes_to_its_end_and_no_call_is_lost_or_repeated(
    part: int, tmp_path: Path
) -> None:
    ends: dict[str, int] = {"done": 0, "preempted": 0, "failed": 0}
    for seed in range(part, SCHEDULES, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        world = World(seed, folder)
        try:
            over = world.play()
            may_fail = "ValueError" in over.reason
            assert outcome(over) != "failed" or may_fail, over.reason
            assert outcome(over) != "done" or over.digest == f"d{world.script.length}"
        except Exception as error:
            error.add_note(f"with seed {seed}, at {world.now:.3f} s")
            raise
        ends[outcome(over)] += 1
    assert ends["done"] > ends["preempted"] > 0, ends


def test_a_schedule_is_its_seed(tmp_path: Path) -> None:
    def end(seed: int) -> State:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        world = World(seed, folder)
        world.play()
        return world.service.state

    assert end(7) == end(7)
    assert end(7) != end(8)
