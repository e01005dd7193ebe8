"""Whatever goes wrong with the membership, the job comes to its end, and the bits stay.

A failing seed is in the test's message; `World(seed).play()` brings it back.
"""

import os

import pytest

from simulation.service import STATE
from simulation.world import World
from unisono.membership.messages import JobOver

pytestmark = pytest.mark.unit

SCHEDULES = int(os.environ.get("UNISONO_SCHEDULES", "400"))


def outcome(over: JobOver) -> str:
    return "done" if over.digest else "preempted" if over.preempted else "failed"


@pytest.mark.parametrize("part", range(4))
def test_whatever_goes_wrong_the_job_comes_to_its_end_and_no_act_is_lost_or_repeated(part: int) -> None:
    ends: dict[str, int] = {"done": 0, "preempted": 0, "failed": 0}
    for seed in range(part, SCHEDULES, 4):
        world = World(seed)
        try:
            over = world.play()
            may_fail = "ValueError" in over.reason
            assert outcome(over) != "failed" or may_fail, over.reason
            assert outcome(over) != "done" or over.digest == f"d{len(world.script)}"
        except Exception as error:
            error.add_note(f"with seed {seed}, at {world.now:.3f} s")
            raise
        ends[outcome(over)] += 1
    assert ends["done"] > ends["preempted"] > 0, ends


def test_a_schedule_is_its_seed() -> None:
    def end(seed: int) -> bytes:
        world = World(seed)
        world.play()
        return STATE.dump_json(world.service.state)

    assert end(7) == end(7)
    assert end(7) != end(8)
