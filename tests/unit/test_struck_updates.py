"""Workers are killed at every mark of a split update, and others while they finish it alone: no bit is another one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from one_at_a_time import BLOWS, Blow, some_of
from struck_run import Outcome, Play, act_out, momentum
from unisono.job import Job
from unisono.train.config.run_config import Execution

pytestmark = pytest.mark.cluster

TRIED = BLOWS // 8
"""So many are tried on each job, drawn from a seed, and about as many pairs of them."""

POINTS = (
    "update begins",
    "piece kept",
    "piece begun",
    "piece updated",
    "piece done",
    "update left alone",
    "update made alone",
    "all_gather begins",
    "all_gather ends",
)
"""Of an update, and the meetings before and after it."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


SPLIT = Execution(overlap=False, looks=True, shard_optimizer=True)
JOB = Job.create(batch_size=16, shards=8, bucket_mb=1e-4)
"""Its parameters are in several buckets, and each worker has several pieces of them."""

PLAYS = {
    f"{workers} workers, {make.__name__}": Play(workers, Path(), SPLIT, job=JOB, optimizer=make)
    for workers, make in ((2, momentum), (2, adam), (3, momentum), (3, adam), (5, adam))
} | {"one joins": Play(2, Path(), SPLIT, job=JOB, joiners=1)}


Serial = Callable[[Play], str]


@pytest.fixture(scope="module")
def serial(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Serial:
    """What a worker comes to that is alone, and updates all by itself."""
    known: dict[Any, str] = {}

    def digest(play: Play) -> str:
        if play.optimizer not in known:
            folder = tmp_path_factory.mktemp("serial")
            whole = replace(play, workers=1, joiners=0, folder=folder, execution=replace(SPLIT, shard_optimizer=False))
            (known[play.optimizer],) = act_out(pool, whole).digests.values()
        return known[play.optimizer]

    return digest


def of_updates(outcome: Outcome) -> list[Blow]:
    """Blows at the points of an update, since the blow before."""
    points = outcome.world.points
    return [
        Blow(name, number, through)
        for name, passed in points.items()
        for number, point in enumerate(passed)
        if point in POINTS
        for through in some_of([other for other in points if other != name])
    ]


def drawn(blows: Sequence[Blow], count: int) -> list[Blow]:
    return random.Random(1).sample(list(blows), min(len(blows), count))


def trouble_in(outcome: Outcome, digest: str) -> str:
    if outcome.error is not None:
        return f"ends with {outcome.error!r}"
    return "" if set(outcome.digests.values()) == {digest} else f"ends with {sorted(outcome.digests.values())}"


@pytest.mark.parametrize("name", PLAYS)
def test_a_worker_may_die_at_any_mark_of_an_update(
    name: str, pool: ThreadPoolExecutor, serial: Serial, tmp_path: Path
) -> None:
    play = replace(PLAYS[name], folder=tmp_path)
    whole = act_out(pool, play)
    assert trouble_in(whole, serial(play)) == ""
    blows, found = of_updates(whole), {}
    assert {"piece kept", "piece begun", "piece updated", "piece done"} <= set(
        chain.from_iterable(whole.world.points.values())
    )
    for blow in drawn(blows, TRIED):
        outcome = act_out(pool, play, blow)
        assert outcome.world.struck == 1, f"{blow}: it did not fall"
        found[blow] = trouble_in(outcome, serial(play))
    assert {blow: trouble for blow, trouble in found.items() if trouble} == {}


@pytest.mark.parametrize("name", ["3 workers, momentum", "5 workers, adam", "one joins"])
def test_another_may_die_while_it_finishes_the_update_alone(
    name: str, pool: ThreadPoolExecutor, serial: Serial, tmp_path: Path
) -> None:
    play = replace(PLAYS[name], folder=tmp_path)
    whole, found, begun = act_out(pool, play), {}, 0
    for first in drawn(of_updates(whole), -(-TRIED // 3)):
        once = act_out(pool, play, first)
        for second in drawn(of_updates(once), 3):
            outcome = act_out(pool, play, first, second)
            begun += outcome.world.struck == 2
            found[first, second] = trouble_in(outcome, serial(play))
    assert begun
    assert {blows: trouble for blows, trouble in found.items() if trouble} == {}
