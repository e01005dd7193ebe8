"""The update of whole matrices by Muon, by everybody or by owners; and what it costs to measure curvature."""

import json
import random
import statistics
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch

import unisono
from benchmarks.edge import End, ends_of, table_of_ends
from benchmarks.elastic_job import PROGRAM, running
from benchmarks.figures import times_as_fast
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.workloads import WORKLOADS
from unisono.errors import UnisonoWarning

WARM_UP = 4
"""Steps that are not counted."""

FORMS = {"everybody": "whole-muon", "owners": "muon"}
"""The program's optimizers, by who makes an update."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        models: names in ``WORKLOADS``.
        workers: how many train together.
        rounds: jobs of each form, in turns.
        steps: counted in each.
        seed: of the order.
        seeds: trainings of each kind with a learning rate.
    """

    models: tuple[str, ...] = ("gpt",)
    workers: int = 2
    rounds: int = 5
    steps: int = 20
    seed: int = 0
    seeds: int = 5


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
    costs = {model: cost_of_curvature(model, choice.steps) for model in choice.models}
    ends = ends_of(choice.seeds)
    meter.calibrate()
    return Report(
        name="second-order",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[table(choice.workers, found), table_of_costs(costs), table_of_ends(ends)],
        figures={
            "models": {name: asdict(one) for name, one in found.items()},
            "curvature": costs,
            "edge": edge_figures(ends),
        },
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
    command = [*PROGRAM, model, str(choice.workers), FORMS[form]]
    with running(["-n", str(choice.workers)], command) as job:
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


MEASURED: dict[str, dict[str, Any]] = {
    "step": {},
    "critical sharpness": {},
    "one product with the Hessian": {"critical": False, "vectors": 1},
}
"""Arguments of ``run.curvature``; none of a step."""


def cost_of_curvature(model: str, turns: int) -> dict[str, float]:
    """Median processor-seconds of a step of one worker, and of each figure, in turns."""
    workload, seconds = WORKLOADS[model], {name: list[float]() for name in MEASURED}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnisonoWarning)
        with unisono.init(
            batch_size=workload.batch_size, shards=2, seed=0, run_dir=folder, arithmetic={"threads": 1}
        ) as run:
            built = workload.build()
            run.prepare(built, torch.optim.AdamW(built.parameters(), lr=1e-3))
            start = 1.0
            for step in run.steps(workload.data(workload.batch_size * turns), epochs=1, shuffle=False):
                begun = process_time()
                step.run(workload.loss)
                seconds["step"].append(process_time() - begun)
                begun = process_time()
                start = run.curvature(workload.loss, start=start).critical_step
                seconds["critical sharpness"].append(process_time() - begun)
                begun = process_time()
                run.curvature(workload.loss, **MEASURED["one product with the Hessian"])
                seconds["one product with the Hessian"].append(process_time() - begun)
            run.finish()
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def table_of_costs(costs: dict[str, dict[str, float]]) -> Grid:
    """One row per model and figure."""
    rows = [
        (model, name, f"{1e3 * seconds:.1f} ms", f"{seconds / one['step']:.2f}", f"{seconds / one['step']:.1f} %")
        for model, one in costs.items()
        for name, seconds in one.items()
        if name != "step"
    ]
    columns = ("", "figure", "processor time", "of a step, times", "every 100 steps")
    return Grid("Curvature, one worker of one thread", columns, rows)


def edge_figures(ends: dict[str, list[End]]) -> dict[str, list[dict[str, float]]]:
    """For JSON."""
    return {form: [asdict(one) for one in listed] for form, listed in ends.items()}
