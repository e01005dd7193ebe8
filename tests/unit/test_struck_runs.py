"""Workers of whole runs are killed at every point, also while others hold wrong bits: no bit is another one."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

import struck_training
from one_at_a_time import BLOWS, Blow, blows_on
from struck_run import Outcome, Play, act_out, flipped, wrong
from unisono.errors import JobMismatch, WorkerLost
from unisono.failpoints import POINTS
from unisono.train.config.run_config import Execution
from unisono_lab.faults.faults import FlippedPlace

pytestmark = pytest.mark.cluster

TRIED = BLOWS // 5
"""So many are tried on each job, drawn from a seed."""

LOOKING = Execution(overlap=False, looks=True)
AUDITED = replace(LOOKING, audit=1.0)


@pytest.fixture(scope="module")
def serial(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> str:
    (found,) = act_out(pool, Play(1, tmp_path_factory.mktemp("serial"))).digests.values()
    return found


def plays(folder: Path) -> dict[str, Play]:
    """Jobs of whole runs, by what is special about them."""
    return {
        "two workers": Play(2, folder),
        "three workers": Play(3, folder),
        "a minority is healed": Play(3, folder, troubles=(flipped("b", 1),)),
        "a minority's optimizer is healed": Play(3, folder, troubles=(flipped("b", 1, "optimizer"),)),
        "two go back": Play(2, folder, troubles=(flipped("b", 3),)),
        "three go back": Play(3, folder, troubles=(flipped("b", 3), flipped("c", 3, bit=21))),
        "one computes wrongly": Play(3, folder, AUDITED, troubles=(wrong("b", 2),)),
        "rounds": Play(3, folder, strategy="local-sgd:every=2"),
    }


def trouble_in(outcome: Outcome, serial: str, play: Play) -> str:
    """What is not as it should be; empty if all is. An error that says so ends a job that something befell."""
    if outcome.error is not None:
        is_fit = play.troubles and not isinstance(outcome.error, WorkerLost)
        return "" if is_fit else f"ends with {outcome.error!r}"
    if not outcome.digests:
        return "nobody came to the end"
    ends = set(outcome.digests.values())
    is_right = len(ends) == 1 if play.strategy != "all-reduce" else ends == {serial}
    return "" if is_right else f"ends with {sorted(ends)} instead of {serial}"


def has_been_compared(blow: Blow, whole: Outcome, play: Play) -> bool:
    """Whether a worker falls when it is known what has struck another one; or that one itself falls."""
    if play.workers > 2 or not play.troubles or blow.worker in {trouble.worker for trouble in play.troubles}:
        return True
    passed = whole.world.points[blow.worker]
    begun = whole.struck_at
    counted = begun + passed[begun:].index("act counted")
    return blow.point > counted + 1  # the others have counted it, too: the next collective call has ended


@pytest.mark.parametrize("name", plays(Path()))
def test_one_worker_may_die_at_any_point(name: str, pool: ThreadPoolExecutor, serial: str, tmp_path: Path) -> None:
    play = plays(tmp_path)[name]
    whole = act_out(pool, play)
    assert not trouble_in(whole, serial, play)
    assert whole.error is None
    blows = [blow for blow in blows_on(whole.world) if has_been_compared(blow, whole, play)]
    found = {}
    for blow in random.Random(1).sample(blows, min(len(blows), TRIED)):
        outcome = act_out(pool, play, blow)
        assert outcome.world.struck == 1, f"{blow}: it did not fall"
        found[blow] = trouble_in(outcome, serial, play)
    assert {blow: trouble for blow, trouble in found.items() if trouble} == {}


def test_every_point_is_passed_by_a_job_whose_workers_are_killed(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    whole = [act_out(pool, play).world for play in plays(tmp_path).values()]
    lost = [struck_training.train(pool, *size, Blow("a", 40)).world for size in ((2, 0), (2, 1))]
    passed = set(chain.from_iterable(chain.from_iterable(world.points.values()) for world in (*whole, *lost)))
    assert set(POINTS) - passed == {"checkpoint share written"}, "workers of several devices alone pass it"


@pytest.mark.parametrize("place", ["weights", "optimizer"])
def test_a_wrong_state_is_not_handed_over_where_others_hold_it_too(
    place: FlippedPlace, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    play = Play(4, tmp_path, verify_every=100, troubles=(flipped("b", 2, place),))
    whole = act_out(pool, play)
    passed = whole.world.points["a"][: whole.struck_at]
    newest = len(passed) - 1 - passed[::-1].index("act worked out")
    outcome = act_out(pool, play, Blow("a", newest, frozenset("bc")))  # b and c have made the step before, d has not
    assert isinstance(outcome.error, JobMismatch)
    assert "those that have come furthest hold different states" in str(outcome.error)


@pytest.mark.parametrize("place", ["weights", "optimizer"])
@pytest.mark.parametrize("workers", [3, 4])
def test_a_state_that_one_worker_alone_hands_on_is_computed_again(
    workers: int, place: FlippedPlace, pool: ThreadPoolExecutor, serial: str, tmp_path: Path
) -> None:
    play = Play(workers, tmp_path, verify_every=100, troubles=(flipped("b", 2, place),))
    whole = act_out(pool, play)
    passed = whole.world.points["a"][: whole.struck_at]
    newest = len(passed) - 1 - passed[::-1].index("act worked out")
    outcome = act_out(pool, play, Blow("a", newest, frozenset("b")))  # b alone has made the step before
    assert not outcome.error
    assert outcome.struck_at, "the bit has flipped"
    assert set(outcome.digests) == set("bcd"[: workers - 1])
    assert set(outcome.digests.values()) == {serial}


def test_a_state_is_handed_on_by_one_worker_alone_where_there_is_none_to_go_back_to(
    pool: ThreadPoolExecutor, serial: str, tmp_path: Path
) -> None:
    play = Play(3, tmp_path, verify_every=0)
    passed = act_out(pool, play).world.points["a"]
    newest = [point for point, name in enumerate(passed) if name == "act worked out"]
    for point in newest:
        outcome = act_out(pool, play, Blow("a", point, frozenset("b")))
        assert not trouble_in(outcome, serial, play)
