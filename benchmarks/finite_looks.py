"""What it takes to know that a step's gradient is finite: the share of a step that goes to these looks."""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import unisono
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.workloads import WORKLOADS
from unisono.words import Finiteness

WARM_UP = 3
"""Steps: in the first ones memory is allocated, and optimizers make their state."""


def run(models: Sequence[str], steps: int, rounds: int) -> Report:
    """Measure each model with the default number of shards, and with one."""
    meter = NoiseMeter()
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for model in models:
            for shards in (None, 1):
                count, share = _share(model, shards, steps)
                found.setdefault(f"{model}, {count} shards" if count > 1 else f"{model}, 1 shard", []).append(share)
        meter.calibrate()
    rows = [
        (name, f"{statistics.median(each):.2%}", f"{min(each):.2%} … {max(each):.2%}") for name, each in found.items()
    ]
    return Report(
        name="finite-looks",
        settings={"models": models, "steps": steps, "rounds": rounds},
        noise=meter.read(),
        grids=[Grid("Looks whether gradients are finite, one worker of one thread, Adam", ("", "of a step", ""), rows)],
        figures={"shares": found},
    )


def _share(model: str, shards: int | None, steps: int) -> tuple[int, float]:
    """The number of shards, and the share of a step's processor time."""
    workload, total = WORKLOADS[model], 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        unisono.init(
            batch_size=workload.batch_size, shards=shards, seed=0, run_dir=folder, arithmetic={"threads": 1}
        ) as run,
        _timed() as spent,
    ):
        built = workload.build()
        run.prepare(built, torch.optim.Adam(built.parameters(), lr=1e-3))
        for step in run.steps(workload.data(workload.batch_size * (WARM_UP + steps)), epochs=1, shuffle=False):
            if step.number == WARM_UP:
                spent.clear()
                begun = time.process_time()
            step.run(workload.loss)
        total = time.process_time() - begun
        return run.job.shards, sum(spent) / total


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Times all looks; what the clock takes counts, too."""
    spent: list[float] = []

    def timed(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*arguments: Any) -> Any:
            begun = time.thread_time()
            try:
                return real(*arguments)
            finally:
                spent.append(time.thread_time() - begun)

        return call

    look, asked = Finiteness.look, Finiteness.start_check
    Finiteness.look, Finiteness.start_check = timed(look), timed(asked)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Finiteness.look, Finiteness.start_check = look, asked  # type: ignore[method-assign]
