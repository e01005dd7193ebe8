"""A script may make the update by itself: once on each worker, on the mean gradient, whoever is lost meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from one_at_a_time import BLOWS, Blow, blows_on
from struck_run import Play, act_out, flipped, loss, momentum, network, samples_of, state_of
from unisono.job import Job
from unisono.train.config.run_config import Execution
from unisono.train.model.tensors import digest_tensors, tensors_of
from unisono.train.run import Run
from unisono.train.step.loss import BackwardDone
from unisono.train.step.step import Step
from unisono.train.step.weights_watch import FIRST

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore:BatchNorm")]

TRIED = BLOWS // 5

PLAIN = Execution(overlap=False)
LOOKING = Execution(overlap=False, looks=True)


def own(run: Run, told: Callable[[Run, Step], None], make: Callable[[Any], torch.optim.Optimizer] = momentum) -> str:
    """Clips, steps, schedules and averages in the update; notes what it saw, and what no checkpoint has."""
    model = network()
    optimizer = make(model.parameters())
    scheduler = run.register("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7))
    average = run.register("average", AveragedModel(model, avg_fn=get_ema_avg_fn(0.5)))
    run.on("step_begins", told)
    seen: dict[int, Any] = {}
    samples, losses = torch.tensor(0), SimpleNamespace(values=torch.empty(0))
    further = {"samples": (samples, "sum"), "losses": (losses, {"values": "cat"})}
    run.prepare(model, optimizer, state=further)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        found = loss(model, batch)
        samples.add_(len(batch[0]))
        losses.values = torch.cat([losses.values, found.detach()[None]])
        return found

    for step in run.steps(samples_of(run), epochs=1, shuffle=False):

        def update(step: Step = step) -> str:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            optimizer.zero_grad()
            seen[step.number] = step.loss.hex()
            return float(norm).hex()

        found = step.run(loss_fn, update=update)
        if step.returned is not None:  # else the run goes back, and the step comes again
            assert found.hex() == seen[step.number]
            seen[step.number] += step.returned
    state = f"{state_of(optimizer)} {digest_tensors(tensors_of(average))} {int(samples)} {losses.values.tolist()}"
    return f"{run.finish()} {state} {sorted(seen.items())}"


def gone_backward(
    run: Run, told: Callable[[Run, Step], None], make: Callable[[Any], torch.optim.Optimizer] = momentum
) -> str:
    """Goes backward in the loss function."""

    def loss_fn(model: Any, batch: Any) -> BackwardDone:
        found = loss(model, batch)
        found.backward()
        return BackwardDone(found)

    model = network()
    optimizer = make(model.parameters())
    run.prepare(model, optimizer)
    run.on("step_begins", told)
    for step in run.steps(samples_of(run), epochs=1, shuffle=False):
        step.run(loss_fn)
    return f"{run.finish()} {state_of(optimizer)}"


def plays(folder: Path) -> dict[str, Play]:
    two = Play(2, folder, script=own)
    return {
        "two workers": two,
        "three workers": replace(two, workers=3),
        "four workers": replace(two, workers=4),
        "gradients of the loss functions own": replace(two, workers=3, script=gone_backward),
        "nothing is compared": replace(two, workers=3, execution=Execution(overlap=False), verify_every=0),
        "a minority is healed": replace(two, workers=3, troubles=(flipped("b", 1),)),
        "three go back": replace(two, workers=3, troubles=(flipped("b", 3), flipped("c", 3, bit=21))),
        "one computes wrongly": replace(two, workers=3, execution=replace(LOOKING, audit=1.0)),
    }


def ends_of(play: Play, outcome: Any) -> set[str]:
    """What workers came to: those that are wrong may end with an error that says so."""
    if outcome.error is not None:
        assert play.troubles, outcome.error
        return set()
    return set(outcome.digests.values())


def require_one_end(play: Play, pool: ThreadPoolExecutor) -> None:
    """One of four workers dies when an update is worked out, and some of the others have made it."""
    whole = act_out(pool, play)
    (serial,) = set(whole.digests.values())
    passed = whole.world.points["a"]
    updates = [point for point, name in enumerate(passed) if name == "act worked out"]
    blows = [Blow("a", point, frozenset(through)) for through in ("b", "bc", "d") for point in updates]
    for blow in random.Random(3).sample(blows, min(len(blows), TRIED)):
        struck = act_out(pool, play, blow)
        assert struck.world.struck == 1
        assert set(struck.digests.values()) == {serial}, (blow, struck.error)
        assert set(struck.digests) == set("bcd")


@pytest.mark.parametrize("name", plays(Path()))
def test_one_worker_may_die_at_any_point_around_an_update_of_the_scripts_own(
    name: str, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    play = plays(tmp_path)[name]
    (serial,) = act_out(pool, Play(1, tmp_path / "serial", script=play.script)).digests.values()
    whole = act_out(pool, play)
    assert ends_of(play, whole) == {serial}
    blows = list(blows_on(whole.world))
    for blow in random.Random(2).sample(blows, min(len(blows), TRIED)):
        struck = act_out(pool, play, blow)
        assert ends_of(play, struck) <= {serial}, blow
        assert play.troubles or struck.digests, blow


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_update_is_made_once_on_each_of_any_number_of_workers(
    workers: int, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    play = Play(1, tmp_path, script=own, job=Job.create(batch_size=16, shards=8))
    (serial,) = act_out(pool, play).digests.values()
    found = act_out(pool, replace(play, workers=workers)).digests
    assert list(found.values()) == [serial] * workers


def test_optimizers_that_the_script_steps_by_itself_end_where_they_do_without(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    def script(own: bool) -> Callable[..., str]:
        def train(run: Run, told: Callable[[Run, Step], None], make: Callable[[Any], torch.optim.Optimizer]) -> str:
            model = network()
            optimizer = make(model.parameters())
            run.prepare(model, optimizer)
            for step in run.steps(samples_of(run), epochs=1, shuffle=False):
                step.run(loss, clip_norm=0.1, update=optimizer.step if own else None)
            return f"{run.finish()} {state_of(optimizer)}"

        return train

    found = {
        digest
        for own in (False, True)
        for workers in (1, 3)
        for digest in act_out(pool, Play(workers, tmp_path, script=script(own))).digests.values()
    }
    assert len(found) == 1


@pytest.mark.parametrize("verify_every", [pytest.param(0, marks=pytest.mark.slow), 100])
def test_whoever_is_behind_makes_the_update_that_others_have_made(
    verify_every: int, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    play = Play(4, tmp_path, LOOKING if verify_every else PLAIN, verify_every, script=own)
    require_one_end(play, pool)


def halving(
    run: Run,
    told: Callable[[Run, Step], None],
    make: Callable[[Any], torch.optim.Optimizer] = momentum,
    first_step: int = 0,
    measured_step: int = -1,
) -> str:
    """Changes weights, a buffer and what the optimizer keeps in the loop's body, from a step on; may measure before."""
    model, bodies = network(), torch.zeros(())
    model.register_buffer("bodies", bodies)
    optimizer = make(model.parameters())
    run.prepare(model, optimizer)
    run.on("step_begins", told)
    first, *_, last = model.parameters()
    for step in run.steps(samples_of(run), epochs=1 + first_step, shuffle=False, max_steps=first_step + 4):
        step.run(loss)
        if step.number == measured_step:
            run.curvature(loss, critical=False, vectors=1)
        if step.number >= first_step and not run.inside.trained.is_doubted:
            bodies += 1
            first.data.mul_(0.5)
            optimizer.state[last]["momentum_buffer"] *= 0.5
    return f"{run.finish()} {state_of(optimizer)} {int(bodies)}"


@pytest.mark.parametrize("verify_every", [pytest.param(0, marks=pytest.mark.slow), 100])
def test_what_the_body_changes_behind_an_update_counts_once_on_whoever_is_behind(
    verify_every: int, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    play = Play(4, tmp_path, LOOKING if verify_every else PLAIN, verify_every, script=halving)
    require_one_end(play, pool)


@pytest.mark.slow
def test_a_first_change_that_nobody_could_expect_ends_the_job_rather_than_in_other_weights(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    play = Play(4, tmp_path, PLAIN, 0, script=partial(halving, first_step=FIRST + 1))
    whole = act_out(pool, play)
    (serial,) = set(whole.digests.values())
    passed = whole.world.points["a"]
    updates = [point for point, name in enumerate(passed) if name == "act worked out"][-7:]
    errors = set()
    for through in ("b", "bc"):
        for point in updates:
            struck = act_out(pool, play, Blow("a", point, frozenset(through)))
            assert set(struck.digests.values()) <= {serial}, (through, point)
            if struck.error is not None:
                errors.add(str(struck.error).partition(": ")[2])
    (error,) = errors
    assert error.startswith("the loop's body has changed weights, and a worker that lacks the update before that")


def test_a_change_behind_a_measurement_is_seen_and_the_measurement_is_none(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    first = FIRST + 1
    play = Play(4, tmp_path, PLAIN, 0, script=partial(halving, first_step=first, measured_step=first))
    whole = act_out(pool, play)
    (serial,) = set(whole.digests.values())
    passed = whole.world.points["a"]
    before, _, behind, *others = [point for point, name in enumerate(passed) if name == "act worked out"][-7:]
    assert len(others) == 4  # two updates, and the end in two acts
    for update in (before, behind):
        struck = act_out(pool, play, Blow("a", update, frozenset("b")))
        assert struck.error is None, update
        assert set(struck.digests.values()) == {serial}, update
        assert set(struck.digests) == set("bcd")
