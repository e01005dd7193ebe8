"""Workers are killed and come around measurements of curvature: all stay in the same calls, and no bit is another."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from one_at_a_time import BLOWS, Blow, blows_on
from struck_run import STEPS, Play, act_out, loss, momentum, network, samples_of, state_of
from unisono.job import Job
from unisono.train.run import Run
from unisono.train.step.step import Step

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore:BatchNorm")]


def measured(
    run: Run, told: Callable[[Run, Step], None], make: Callable[[Any], torch.optim.Optimizer] = momentum
) -> str:
    """Measures before two updates, and after the last."""
    model = network()
    optimizer = make(model.parameters())
    run.prepare(model, optimizer)
    run.on("step_begins", told)
    for step in run.steps(samples_of(run), epochs=1, shuffle=False):
        if step.number in (0, 1):
            run.curvature(loss, vectors=1, start=20.0)
        step.run(loss)
        if step.number == STEPS - 1:  # whoever has joined has seen it
            last = run.curvature(loss, iterations=2, critical=False)
    return f"{run.finish()} {state_of(optimizer)} {last}"


THREE = Play(3, Path(), script=measured, joiners=1)
FIVE = Play(5, Path(), script=measured, job=Job.create(batch_size=10, shards=5))


def struck(pool: ThreadPoolExecutor, play: Play, tried: int) -> None:
    """Blows drawn from all that could fall while it is measured for the second time, and in the boundary before."""
    (serial,) = act_out(pool, replace(play, workers=1, joiners=0, execution=Play(1, Path()).execution)).digests.values()
    whole = act_out(pool, play)
    assert len(whole.digests) == play.workers + play.joiners
    assert set(whole.digests.values()) == {serial}
    counted = [number for number, name in enumerate(whole.world.points["a"]) if name == "act counted"]
    first = counted.index(next(n for n in counted if "reduce ends" in whole.world.points["a"][:n]))
    begun, ended = counted[first + 1], counted[-3]
    blows = [blow for blow in blows_on(whole.world) if begun <= blow.point <= ended]
    for blow in random.Random(1).sample(blows, tried):
        outcome = act_out(pool, play, blow)
        assert not outcome.error, blow
        assert set(outcome.digests.values()) == {serial}, blow


def test_workers_die_and_come_around_measurements(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    struck(pool, replace(THREE, folder=tmp_path), 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("play", [replace(THREE, workers=2), THREE, FIVE])
def test_workers_die_and_come_at_many_points_around_measurements(
    play: Play, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    struck(pool, replace(play, folder=tmp_path), BLOWS // 2)


@pytest.mark.parametrize("through", ["b", "bc"])
def test_workers_compare_together_what_was_asked_for_before_a_loss(
    through: str, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    play = Play(4, tmp_path, verify_every=100, joiners=1, job=Job.create(batch_size=10, shards=5))
    points = act_out(pool, play).world.points["a"]
    made = points.index("act worked out", points.index("reduce begins"))  # all know that somebody wants to join
    outcome = act_out(pool, play, Blow("a", made, frozenset(through)))
    assert not outcome.error
    assert sorted(outcome.digests) == ["b", "c", "d", "e"]
    assert len(set(outcome.digests.values())) == 1
