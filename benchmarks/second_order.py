"""The update of whole matrices by Muon: every worker makes all of it, or each matrix has one owner."""

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

WARM_UP = 4
"""Steps that are not counted."""

FORMS = {"everybody": "0", "owners": "auto"}
"""Values of ``UNISONO_SHARD_OPTIMIZER``."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        models: names in ``WORKLOADS``.
        workers: how many train together.
        rounds: jobs of each form, in turns.
        steps: counted in each.
        seed: of the order.
    """

    models: tuple[str, ...] = ("gpt",)
    workers: int = 2
    rounds: int = 5
    steps: int = 20
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
    found = {model: one_model(choice, model, order) for model in choice.models}
    meter.calibrate()
    return Report(
        name="second-order",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[table(choice.workers, found)],
        figures={"models": {name: asdict(one) for name, one in found.items()}},
    )


def one_model(choice: Choice, model: str, order: random.Random) -> Found:
    """Jobs of both forms in turns."""
    found = Found({form: [] for form in FORMS}, {form: [] for form in FORMS})
    for _ in range(choice.rounds):
        for form in order.sample(list(FORMS), len(FORMS)):
            step, update = one_job(choice, model, form)
            found.steps[form].append(step)
            found.updates[form].append(update)
    return found


def one_job(choice: Choice, model: str, form: str) -> tuple[float, float]:
    """The median seconds of a step, and of the update in it."""
    variables = {**shared_fork_server(), "UNISONO_SHARD_OPTIMIZER": FORMS[form]}
    with running(["-n", str(choice.workers)], [*PROGRAM, model, str(choice.workers), "muon"], variables) as job:
        job.until(lambda: len(lines_of(job.folder)) >= WARM_UP + choice.steps, f"{choice.steps} steps")
        seconds = [line["seconds"] for line in lines_of(job.folder)[WARM_UP:]]
    return (statistics.median(each["total"] for each in seconds), statistics.median(each["update"] for each in seconds))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "seconds" in line]


def table(workers: int, found: dict[str, Found]) -> Grid:
    """One row per model and form."""
    rows = [
        (
            name,
            form,
            f"{1e3 * statistics.median(one.steps[form]):.1f} ms",
            f"{1e3 * statistics.median(one.updates[form]):.1f} ms",
            ratio_of(one) if form == "owners" else "",
        )
        for name, one in found.items()
        for form in FORMS
    ]
    columns = ("", "matrices are updated by", "step", "update in it", "update as fast, times")
    return Grid(f"Muon on {workers} workers of one thread", columns, rows)


def ratio_of(found: Found) -> str:
    """How many times as fast the update is with owners, and the interval."""
    ratio = times_as_fast(found.updates["owners"], found.updates["everybody"])
    return f"{ratio.value:.2f} ({ratio.low:.2f} … {ratio.high:.2f})"
