"""The cost of an update: whole, split between workers that stay, and split between workers that may be lost."""

import json
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic_job import PROGRAM, running, shared_fork_server
from benchmarks.figures import times_as_fast
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report

WORKERS = 2
WARM_UP = 4
"""Steps of all workers that are not counted: the first updates of a generation are whole."""

FORMS = {
    "whole": (str(WORKERS), "0"),
    "split": (str(WORKERS), "1"),
    "split, elastic": (f"1:{WORKERS}", "1"),
}
"""Options of ``unisono run -n``, and of the split update."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        models: names in ``WORKLOADS``.
        optimizers: words of ``benchmarks.programs.elastic``.
        rounds: jobs of each form, in turns.
        steps: counted in each.
        seed: of the order.
    """

    models: tuple[str, ...] = ("mlp", "resnet", "gpt")
    optimizers: tuple[str, ...] = ("sgd", "fused-adamw")
    rounds: int = 5
    steps: int = 30
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Medians of each job, in seconds, by the form of the update.

    Attributes:
        steps: of a whole step.
        updates: of the update in it.
    """

    steps: dict[str, list[float]]
    updates: dict[str, list[float]]


def run(choice: Choice) -> Report:
    """Measure, model by model."""
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    found = {
        f"{model}, {optimizer}": one_model(choice, model, optimizer, order)
        for model in choice.models
        for optimizer in choice.optimizers
    }
    meter.calibrate()
    return Report(
        name="split-update",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[table(found)],
        figures={"models": {name: asdict(one) for name, one in found.items()}},
    )


def one_model(choice: Choice, model: str, optimizer: str, order: random.Random) -> Found:
    """Jobs of all forms in turns."""
    found = Found({form: [] for form in FORMS}, {form: [] for form in FORMS})
    for _ in range(choice.rounds):
        for form in order.sample(list(FORMS), len(FORMS)):
            step, update = one_job(choice.steps, model, optimizer, form)
            found.steps[form].append(step)
            found.updates[form].append(update)
    return found


def one_job(steps: int, model: str, optimizer: str, form: str) -> tuple[float, float]:
    """The median seconds of a step, and of the update in it."""
    workers, split = FORMS[form]
    variables = {**shared_fork_server(), "UNISONO_SHARD_OPTIMIZER": split}
    with running(["-n", workers], [*PROGRAM, model, str(WORKERS), optimizer], variables) as job:
        job.until(lambda: len(of_all(job.folder)) >= WARM_UP + steps, f"{steps} steps of {WORKERS} workers")
        seconds = [line["seconds"] for line in of_all(job.folder)[WARM_UP:]]
        assert bool(job.journal("memory shared")) == (split == "1"), "the update is the one that is measured"
    return (statistics.median(each["total"] for each in seconds), statistics.median(each["update"] for each in seconds))


def of_all(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps of all workers."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line.get("world_size") == WORKERS and "seconds" in line]


def table(found: dict[str, Found]) -> Grid:
    """One row per model, optimizer and form."""
    rows = [
        (
            name,
            form,
            f"{1e3 * statistics.median(one.steps[form]):.1f} ms",
            f"{1e3 * statistics.median(one.updates[form]):.2f} ms",
            str(times_as_fast(one.steps[form], one.steps["whole"])) if form != "whole" else "",
            cost_of(one, form),
        )
        for name, one in found.items()
        for form in FORMS
    ]
    columns = ("", "update", "step", "update in it", "as fast as whole, times", "more than split, % of a step")
    return Grid(f"The update of {WORKERS} workers of one thread", columns, rows)


def cost_of(one: Found, form: str) -> str:
    """What it takes beyond the update that is split between workers that stay, as a share of their step."""
    if form != "split, elastic":
        return ""
    more = statistics.median(one.updates[form]) - statistics.median(one.updates["split"])
    return f"{100 * more / statistics.median(one.steps['split']):.1f}"
