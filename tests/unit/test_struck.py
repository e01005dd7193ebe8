"""Workers are killed at every point, and others at every point of the recovery that follows: no bit is another one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from one_at_a_time import BLOWS, Blow, blows_on
from struck_training import Memory, Outcome, train
from unisono.errors import CheckpointError
from unisono.plan.batches import Position
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.membership import StateTransfer
from unisono.train.model.prepared import Prepared
from unisono.train.state.policy_state import PolicyState
from unisono.train.state.trained import Reading, Trained

pytestmark = pytest.mark.cluster

SIZES = [(2, 0), (3, 0), (4, 0), (1, 1), (2, 1), (3, 1)]
"""How many workers there are to begin with, and how many join them."""

FIRST = BLOWS // 4
"""Of so many first blows, others fall into the recoveries."""


@pytest.fixture(scope="module")
def serial(pool: ThreadPoolExecutor) -> Outcome:
    return train(pool, 1)


def wrong(outcome: Outcome, serial: Outcome) -> str:
    """What is not as on a single worker that nothing happens to; empty if all is."""
    (digest,), (losses,) = serial.digests.values(), serial.losses.values()
    if not outcome.digests:
        return "nobody came to the end"
    for name, found in outcome.digests.items():
        if found != digest:
            return f"{name} ends with {found}, and should with {digest}"
        if other := {step for step, loss in outcome.losses[name].items() if losses[step] != loss}:
            return f"{name} was told another loss in step {min(other)}"
    return ""


def failures(
    pool: ThreadPoolExecutor,
    serial: Outcome,
    size: tuple[int, int],
    scripts: Sequence[Sequence[Blow]],
    acts: type[CollectiveCalls] = CollectiveCalls,
) -> list[str]:
    """Those scripts of blows after which something is wrong."""
    found = []
    for blows in scripts:
        outcome = train(pool, *size, *blows, acts=acts)
        assert outcome.world.struck == len(blows), f"{blows}: not all of them fell"
        if trouble := wrong(outcome, serial):
            found.append(f"{list(blows)}: {trouble}")
    return found


def recovery(passed: Sequence[str]) -> int:
    """How many points a worker passes until it trains on, and a little further."""
    return min(len(passed), 6 + (passed.index("caught up") if "caught up" in passed else len(passed)))


def pairs_of_blows(pool: ThreadPoolExecutor, size: tuple[int, int]) -> list[list[Blow]]:
    """Blows, each with one that falls into the recovery from it, above all where a state is handed over there."""
    draw, first = random.Random(sum(size)), list(blows_on(train(pool, *size).world))
    after = [(blow, train(pool, *size, blow)) for blow in draw.sample(first, min(len(first), 2 * FIRST))]
    after.sort(key=lambda one: not any("state taken" in passed for passed in one[1].world.points.values()))
    pairs = [
        [blow, second]
        for blow, outcome in after[:FIRST]
        for second in blows_on(outcome.world)
        if second.point < recovery(outcome.world.points[second.worker])
    ]
    return draw.sample(pairs, min(len(pairs), BLOWS))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_one_worker_may_die_at_any_point(pool: ThreadPoolExecutor, serial: Outcome, size: tuple[int, int]) -> None:
    whole = train(pool, *size)
    assert not wrong(whole, serial)
    blows = list(blows_on(whole.world))
    tried = [[blow] for blow in random.Random(0).sample(blows, min(len(blows), BLOWS))]
    assert failures(pool, serial, size, tried) == []


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_another_may_die_at_any_point_of_the_recovery(
    pool: ThreadPoolExecutor, serial: Outcome, size: tuple[int, int]
) -> None:
    assert failures(pool, serial, size, pairs_of_blows(pool, size)) == []


class LateCount(CollectiveCalls):
    """Sets the state that was handed over at once, and counts it when the collectives after it are done."""

    late: tuple[int, Any, bool] | None = None

    def _take_over(self, done: int, value: Any, given: Any, cause: Any, *, changed: bool, joins: bool) -> None:
        if changed:
            self.recovery.take(given, joins=joins)
        self.late = done, value, changed

    def _catch_up(self, transfer: StateTransfer) -> None:
        self.late = None
        super()._catch_up(transfer)
        if self.late is not None:
            done, value, changed = self.late
            self._commit(done, lambda: value, lambda: None, changed=changed)


def test_a_count_that_follows_its_state_only_after_collectives_is_found(
    pool: ThreadPoolExecutor, serial: Outcome
) -> None:
    found = failures(pool, serial, (3, 0), pairs_of_blows(pool, (3, 0)), LateCount)
    assert any("ends with" in each for each in found), found


def test_one_worker_may_die_at_any_point_of_a_run_that_resumes(pool: ThreadPoolExecutor) -> None:
    first = Memory()
    train(pool, 1, memory=first)

    def resumed(workers: int, *blows: Blow) -> Outcome:
        memory = Memory()
        memory.kept = first.kept[:1]
        return train(pool, workers, 0, *blows, memory=memory)

    serial, whole = resumed(1), resumed(3)
    assert not wrong(whole, serial)
    blows = [
        blow for blow in blows_on(whole.world) if blow.point < whole.world.points[blow.worker].index("act counted") + 6
    ]
    tried = random.Random(0).sample(blows, min(len(blows), 2 * BLOWS))
    troubles = {blow: wrong(resumed(3, blow), serial) for blow in tried}
    assert {blow: trouble for blow, trouble in troubles.items() if trouble} == {}


def test_a_worker_that_joins_in_a_loop_does_not_train_other_parameters_than_the_others() -> None:
    member, joiner = (Trained({}, PolicyState((), 8, 8)) for _ in range(2))
    for one, is_frozen in ((member, False), (joiner, True)):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model[0].requires_grad_(not is_frozen)
        one.prepared = Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    member.progress = replace(member.progress, reading=Reading(8, shuffle=False, drop_last=False))
    with pytest.raises(CheckpointError, match="freeze and unfreeze between two loops"):
        joiner.take(member.give(), joins=True)


def test_a_checkpoint_is_handed_on_as_it_was_until_all_have_restored_it() -> None:
    x, y = (Trained({}, PolicyState((), 8, 8)) for _ in range(2))
    for one in (x, y):
        model = torch.nn.Linear(2, 1)
        one.prepared = Prepared.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    x.progress, x.policy_state.rate = replace(x.progress, position=Position(step=7)), 2.0
    x.go_back(x.capture())
    x.restored = x.capture()
    x.settle()
    assert x.prepared is not None
    assert y.prepared is not None
    x.prepared.optimizers[0].param_groups[0]["lr"] = 0.05
    y.take(x.give(), joins=False)
    assert (y.progress, y.policy_state.rate) == (x.progress, 2.0)
    assert y.settle()
    assert y.prepared.optimizers[0].param_groups[0]["lr"] == 0.1
    x.go_on()
    assert not x.give()[0]
