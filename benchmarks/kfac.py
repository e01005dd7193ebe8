"""K-FAC beside SGD and AdamW, each at the best of a small grid; and what sharing its work brings."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

import unisono
import unisono_lab
from benchmarks.edge import digits
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.thread_crew import Trade, train
from unisono.errors import UnisonoWarning
from unisono.job import Job
from unisono.train.config.run_config import Execution
from unisono.train.run import Run
from unisono_lab.second_order.kfac import KnownLayer

BATCH, MOST, LOOK_EVERY = 128, 300, 2
TUNED_WITH = 100
"""The seed of the search for settings; those of the comparison are others."""

Make = Callable[[nn.Module], Optimizer]


def _sgd(lr: float, model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=lr, momentum=0.9)


def _adamw(lr: float, model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=lr)


def _kfac(lr: float, damping: float, model: nn.Module) -> Optimizer:
    return unisono_lab.KFAC(model, lr=lr, damping=damping, kl_clip=1e-2)


GRIDS: dict[str, dict[str, Make]] = {
    "SGD": {f"lr {lr}": partial(_sgd, lr) for lr in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)},
    "AdamW": {f"lr {lr}": partial(_adamw, lr) for lr in (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1)},
    "KFAC": {
        f"lr {lr}, damping {damping}": partial(_kfac, lr, damping) for lr in (0.03, 0.1) for damping in (0.01, 0.1, 1.0)
    },
}
"""Momentum is 0.9 everywhere. As many settings for each."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is trained, and when it is done.

    Attributes:
        build: makes the model.
        loss: the mean loss over samples.
        is_there: whether the target is reached, told the model and the held-out images.
        target: the target in words.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    is_there: Callable[[nn.Module, Tensor, Tensor], bool]
    target: str


def _classified(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _rebuilt(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = (model(images) - images.flatten(1)).square().sum(1).mean() / 2
    return loss


def _is_right(share: float, model: nn.Module, images: Tensor, labels: Tensor) -> bool:
    return float((model(images).argmax(1) == labels).float().mean()) >= share


def _is_near(most: float, model: nn.Module, images: Tensor, labels: Tensor) -> bool:
    return float(_rebuilt(model, images, labels)) <= most


def _network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def _autoencoder() -> nn.Module:
    sizes = (64, 100, 50, 16, 50, 100, 64)
    layers = [part for one, other in pairwise(sizes) for part in (nn.Linear(one, other), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


PROBLEMS = {
    "digits": Problem(_network, _classified, partial(_is_right, 0.93), "93 % of held-out images right"),
    "autoencoder": Problem(_autoencoder, _rebuilt, partial(_is_near, 0.6), "held-out loss of 0.6"),
    "ConvNet": Problem(_convnet, _classified, partial(_is_right, 0.96), "96 % of held-out images right"),
}


@dataclass(frozen=True, slots=True)
class Race:
    """What a training took to its target; infinite if it did not get there.

    Attributes:
        steps: to the target.
        seconds: of processor time, without the looks at held-out images.
        step_s: of processor time of a step, in the mean.
    """

    steps: float
    seconds: float
    step_s: float


def races_of(seeds: int) -> dict[str, dict[str, tuple[str, list[Race]]]]:
    """Of each problem and optimizer the best setting, and its trainings."""
    races: dict[str, dict[str, tuple[str, list[Race]]]] = {}
    for name, problem in PROBLEMS.items():
        races[name] = {}
        for kind, grid in GRIDS.items():
            tried = {setting: race(problem, make, TUNED_WITH) for setting, make in grid.items()}
            best = min(tried, key=lambda each: tried[each].steps)
            races[name][kind] = best, [race(problem, grid[best], seed) for seed in range(seeds)]
    return races


def race(problem: Problem, make: Make, seed: int) -> Race:
    """One training of one thread, in a plain loop."""
    training, held_out = (one.tensors for one in digits())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = problem.build()
    optimizer, generator = make(model), torch.Generator().manual_seed(seed)
    seconds, steps = 0.0, 0
    try:
        while steps < MOST:
            for chosen in torch.randperm(len(training[0]), generator=generator).split(BATCH)[:-1]:
                begun = time.process_time()
                optimizer.zero_grad()
                problem.loss(model, *(one[chosen] for one in training)).backward()
                optimizer.step()
                seconds, steps = seconds + time.process_time() - begun, steps + 1
                if steps % LOOK_EVERY == 0:
                    with torch.no_grad():
                        if problem.is_there(model, *held_out):
                            return Race(steps, seconds, seconds / steps)
    except unisono.errors.NonFiniteLoss:  # a rate that is too large
        pass
    finally:
        torch.set_num_threads(threads)
    return Race(float("inf"), float("inf"), seconds / max(1, steps))


def run(seeds: int) -> Report:
    """Measure all of it."""
    meter = NoiseMeter()
    races, sharing = races_of(seeds), sharing_of()
    meter.calibrate()
    return Report(
        name="kfac",
        settings={"seeds": seeds, "batch": BATCH, "most steps": MOST, "width": WIDTH},
        noise=meter.read(),
        grids=[table_of_races(races), table_of_sharing(sharing)],
        figures={
            "races": {
                name: {kind: [best, [asdict(one) for one in listed]] for kind, (best, listed) in kinds.items()}
                for name, kinds in races.items()
            },
            "sharing": {str(count): one for count, one in sharing.items()},
        },
    )


def table_of_races(results: dict[str, dict[str, tuple[str, list[Race]]]]) -> Grid:
    """One row per problem and optimizer."""
    rows = []
    for name, kinds in results.items():
        for kind, (best, races) in kinds.items():
            steps, spent = [one.steps for one in races], [1e3 * one.seconds for one in races]
            rows.append(
                (
                    f"{name}: {PROBLEMS[name].target}",
                    f"{kind}, {best}",
                    f"{statistics.median(steps):g} ({min(steps):g} … {max(steps):g})",
                    f"{statistics.median(spent):.0f} ms ({min(spent):.0f} … {max(spent):.0f})",
                    f"{1e3 * statistics.median(one.step_s for one in races):.1f} ms",
                )
            )
    columns = ("target", "at its best of 6", "steps to it", "processor time to it", "of a step")
    return Grid(f"K-FAC beside others, one thread, batches of {BATCH}, median (least … most)", columns, rows)


# What sharing brings.

WIDTH, STEPS = 384, 6


class Timed(unisono_lab.KFAC):
    """Notes the processor time of each worker's decompositions: workers are threads."""

    def worked_out(self, piece: int) -> list[Tensor]:
        """Decompose a factor."""
        with _timed("decompositions"):
            return super().worked_out(piece)


_times: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))


@contextmanager
def _timed(name: str) -> Iterator[None]:
    begun = time.thread_time()
    try:
        yield
    finally:
        _times[name][threading.get_ident()] += time.thread_time() - begun


def sharing_of(counts: tuple[int, ...] = (1, 2, 4)) -> dict[int, dict[str, float]]:
    """Of each number of workers the processor time of the busiest one, per step: factors, and decompositions."""
    real = KnownLayer.sums_of

    def timed(self: KnownLayer, layer_input: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with _timed("factors"):
            return real(self, layer_input, gradient)

    KnownLayer.sums_of = timed  # type: ignore[method-assign]
    try:
        return {count: _shared(count) for count in counts}
    finally:
        KnownLayer.sums_of = real  # type: ignore[method-assign]


def _shared(workers: int) -> dict[str, float]:
    _times.clear()
    job = Job(batch_size=256, shards=4, seed=0, threads=1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnisonoWarning)
        train(Trade(job, workers, Path(folder) / "run", Execution(overlap=False)), _wide)
    return {name: max(one.values()) / STEPS for name, one in _times.items()}


def _wide(run: Run) -> None:
    model: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Linear(WIDTH, 10)
    )
    run.prepare(model, Timed(model, inverses_every=1))
    images = torch.linspace(-9, 9, 256 * STEPS * WIDTH).sin().view(-1, WIDTH)
    for step in run.steps(TensorDataset(images, torch.arange(len(images)) % 10), epochs=1):
        step.run(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    run.finish()


def table_of_sharing(times: dict[int, dict[str, float]]) -> Grid:
    """One row per number of workers."""
    rows = [
        (
            str(count),
            *(
                f"{1e3 * one[name]:.0f} ms ({times[1][name] / one[name]:.2f} times as fast)"
                for name in ("factors", "decompositions")
            ),
        )
        for count, one in times.items()
    ]
    title = f"K-FAC, 7 layers of width {WIDTH}: processor time of the busiest worker, per step that makes both"
    return Grid(title, ("workers", "factors", "decompositions"), rows)
