"""Whole runs whose workers are killed: the real ``Run``, with its engine and its comparisons, in a world of threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.thread_crew import Trade, run_of
from one_at_a_time import Blow, SimulatedMembership, World
from unisono.errors import UnisonoError, UnisonoWarning
from unisono.job import Job
from unisono.train.config.run_config import Execution
from unisono.train.model.tensors import digest_tensors
from unisono.train.run import Run
from unisono.train.step.step import Step
from unisono_lab.faults.faults import FlipBit, FlippedPlace, WrongResult
from unisono_lab.faults.injector import inject

STEPS = 4
JOB = Job.create(batch_size=8, shards=World.shards)

Fault = FlipBit | WrongResult

Script = Callable[[Run, Callable[[Run, Step], None], Callable[[Any], torch.optim.Optimizer]], str]
"""Trains, and returns a digest of all that this has made. What it gets second is told when a step begins."""


@dataclass(frozen=True)
class Trouble:
    """A fault that strikes one worker, once, when a step begins there.

    Attributes:
        worker: its name.
        step: of the job.
        fault: that strikes.
    """

    worker: str
    step: int
    fault: Fault


def flipped(worker: str, step: int, place: FlippedPlace = "weights", bit: int = 22) -> Trouble:
    """A bit flips in what a worker holds."""
    return Trouble(worker, step, FlipBit(rank=0, at_step=step, place=place, bit=bit))


def wrong(worker: str, step: int) -> Trouble:
    """From a step on a worker computes wrongly."""
    return Trouble(worker, step, WrongResult(rank=0, at_step=step, bit=22))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """What trains by default."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Play:
    """A job, and what befalls it besides blows.

    Attributes:
        workers: how many there are.
        folder: below which each world has the folder of its run.
        execution: how steps are carried out.
        verify_every: steps between comparisons of the whole state.
        strategy: by which the workers synchronise.
        troubles: faults that strike without a blow.
        joiners: how many workers come later.
        job: the job.
        optimizer: makes the optimizer of these parameters.
        script: what each worker runs; by default :func:`trained`.
    """

    workers: int
    folder: Path
    execution: Execution = field(default_factory=lambda: Execution(overlap=False, looks=True))
    verify_every: int = 2
    strategy: str = "all-reduce"
    troubles: tuple[Trouble, ...] = ()
    joiners: int = 0
    job: Job = JOB
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum
    script: Script | None = None


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        world: in which it ran.
        digests: of each worker that came to its end, by name: weights and what the optimizer keeps.
        error: with which the job ended instead.
        struck_at: how many points a worker had passed when the first trouble struck it.
    """

    world: World
    digests: dict[str, str] = field(default_factory=dict)
    error: UnisonoError | None = None
    struck_at: int = 0


def act_out(pool: ThreadPoolExecutor, play: Play, *blows: Blow) -> Outcome:
    """Run a job to its end."""
    number = sum(1 for _ in play.folder.iterdir()) if play.folder.exists() else 0
    folder, done, found = play.folder / str(number), set[Trouble](), dict[str, str]()
    trade = Trade(play.job, play.workers, folder, play.execution, play.verify_every, strategy=play.strategy)
    folder.mkdir(parents=True)

    def script(membership: SimulatedMembership) -> None:
        name = membership.worker.name
        mine = [one for one in play.troubles if one.worker == name]
        with run_of(trade, membership) as run:
            found[name] = (play.script or trained)(run, partial(befall, membership, mine), play.optimizer)

    def befall(membership: SimulatedMembership, mine: list[Trouble], run: Run, step: Step) -> None:
        for trouble in mine:
            if trouble.step == step.number and trouble not in done:
                outcome.struck_at = outcome.struck_at or len(membership.worker.passed)
                done.add(trouble)
                inject(trouble.fault, run)

    outcome = Outcome(world := World(script, play.workers, play.joiners, blows), found)
    world.shards = play.job.shards
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnisonoWarning)
        warnings.simplefilter("ignore", UserWarning)  # torch's, of a scheduler's step after a call that did not count
        try:
            world.run(pool)
        except UnisonoError as error:
            outcome.error = error
    return outcome


def trained(
    run: Run, told: Callable[[Run, Step], None], make: Callable[[Any], torch.optim.Optimizer] = momentum
) -> str:
    """The script: a digest of all that its training has made."""
    model = network()
    optimizer = make(model.parameters())
    run.prepare(model, optimizer)
    scheduler = run.register("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7))
    run.on("step_begins", told)
    for step in run.steps(samples_of(run), epochs=1, shuffle=False):
        step.run(loss)
        scheduler.step()
    return f"{run.finish()} {state_of(optimizer)}"


def network() -> nn.Module:
    """A model that draws no random numbers: the generators belong to the whole process."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return model


def samples_of(run: Run) -> TensorDataset:
    """Enough for all steps."""
    return TensorDataset(torch.linspace(-2, 2, STEPS * run.job.require_batch_size("samples") * 4).sin().view(-1, 4))


def state_of(optimizer: torch.optim.Optimizer) -> str:
    """A digest of what an optimizer keeps, and its learning rate."""
    kept = {
        f"{n} {name}": state[name] for n, state in optimizer.state_dict()["state"].items() for name in sorted(state)
    }
    return f"{digest_tensors(kept)} {optimizer.param_groups[0]['lr']}"


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long())
