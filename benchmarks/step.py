"""The step benchmark: a whole training step, by Unisono and by its peers."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.contenders import UNISONO, Contender, everybody
from benchmarks.crew import Allocator, Crew
from benchmarks.figures import counted
from benchmarks.harness import Entry, measure
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.standings import FAILED, TOLERANCE, Standing, standings
from benchmarks.task import Task, Trained, Update
from benchmarks.workloads import WORKLOADS

COLUMNS = ("", "step", "runs, ms", "vs plain loop", "vs best DDP", "efficiency", "losses")


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        models: names in ``WORKLOADS``.
        only: keys of contenders; all if empty.
        settings: other settings of Unisono, to be compared with its defaults; see :meth:`Contender.with_settings`.
        workers: processes of each contender but the plain loop.
        threads: of each of them.
        rounds: fresh processes for each contender.
        steps: counted in each.
        warm_up: steps before those.
        update: torch's implementation of SGD.
        allocator: of all processes.
        seed: of the order.
    """

    models: tuple[str, ...] = ("mlp", "resnet", "gpt")
    only: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    workers: int = 2
    threads: int = 1
    rounds: int = 5
    steps: int = 10
    warm_up: int = 3
    update: Update = "default"
    allocator: Allocator = "tuned"
    seed: int = 0

    def contenders(self) -> list[Contender]:
        """Who is compared."""
        known = everybody(self.workers, self.threads)
        default = next(one for one in known if one.key == UNISONO)
        chosen = [one for one in known if not self.only or one.key in self.only]
        return chosen + [default.with_settings(text) for text in self.settings]


def run(choice: Choice) -> Report:
    """Measure, model by model."""
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    found = {model: one_model(choice, model, meter, order) for model in choice.models}
    meter.calibrate()
    return Report(
        name="step",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[grid for model, table in found.items() for grid in grids(choice, model, table)],
        figures={"models": {model: [asdict(one) for one in table] for model, table in found.items()}},
        failures=[f"{model}: {one.name}" for model, table in found.items() for one in table if one.note == FAILED],
        draw=lambda figure: draw(figure, found),
    )


def one_model(choice: Choice, model: str, meter: NoiseMeter, order: random.Random) -> list[Standing]:
    """Measure all contenders on one model."""
    contenders = choice.contenders()
    present = [one for one in contenders if one.is_installed]
    found = measure([entry(choice, one, model) for one in present], choice.rounds, meter, order)
    by_key = {one.key: measured for one, measured in zip(present, found, strict=True)}
    return standings(contenders, by_key, batch_norm=WORKLOADS[model].batch_norm)


def entry(choice: Choice, contender: Contender, model: str) -> Entry[Trained]:
    """What is run for a contender."""
    task = Task(
        contender=contender.module,
        options=dict(contender.options),
        workload=model,
        batch_size=WORKLOADS[model].batch_size,
        threads=contender.threads,
        update=choice.update,
        warm_up=choice.warm_up,
        steps=choice.steps,
    )
    crew = Crew.here(contender.workers, contender.threads, choice.allocator)
    return Entry(f"{model}, {contender.name}", crew, "training", task, Trained)


def grids(choice: Choice, model: str, table: Sequence[Standing]) -> list[Grid]:
    """For the screen: how the contenders stand, and where the time goes for those that say so."""
    title = (
        f"{model}, batch {WORKLOADS[model].batch_size}; workers of {counted(choice.threads, 'thread')}; "
        f"{counted(choice.rounds, 'run')} in fresh processes; allocator {choice.allocator}, SGD {choice.update}"
    )
    notes = [
        "vs: how many times as fast (95 % interval). Efficiency: plain loop / (workers * step), 1 would be ideal.",
        f"Losses: the largest relative difference among the first ones; up to {TOLERANCE:.0e} counts as rounding.",
    ]
    if WORKLOADS[model].batch_norm:
        notes.append(
            "BatchNorm takes its statistics over the samples of one worker, so the losses of the plain loop are "
            "compared with each other, and those of several workers with each other."
        )
    standing = Grid(title, COLUMNS, [cells(one) for one in table], tuple(notes))
    telling = [one for one in table if one.parts]
    if not telling:
        return [standing]
    names = tuple(telling[0].parts)
    rows = [(one.name, *[f"{1000 * one.parts.get(name, 0.0):.1f}" for name in names]) for one in telling]
    words = tuple(name.replace("_", " ") for name in names)
    return [standing, Grid(f"{model}: where the main worker's time goes, ms", ("", *words), rows)]


def cells(one: Standing) -> tuple[str, ...]:
    """A row of the table."""
    if not one.seconds:
        return (one.name, one.note, "", "", "", "", "")
    verdict = "same" if one.did_same_work else "DIFFERENT"
    return (
        one.name,
        f"{1000 * one.step:.1f} ms",
        f"{1000 * min(one.seconds):.1f} … {1000 * max(one.seconds):.1f}",
        f"{one.of_plain:.2f}" if one.of_plain else "",
        f"{one.of_ddp:.2f}" if one.of_ddp else "",
        f"{one.efficiency:.2f}" if one.efficiency else "",
        f"{verdict} ({one.difference:.0e})" if one.difference else verdict,
    )


def draw(figure: Any, found: Mapping[str, Sequence[Standing]]) -> None:
    """A bar for each contender, a panel for each model; whiskers are the fastest and the slowest run."""
    figure.set_size_inches(6.5 * len(found), 4.5)
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for panel, (model, table) in zip(panels, found.items(), strict=True):
        shown = [one for one in table if one.seconds][::-1]
        below = [1000 * (one.step - min(one.seconds)) for one in shown]
        above = [1000 * (max(one.seconds) - one.step) for one in shown]
        colours = ["tab:orange" if one.key.startswith(UNISONO) else "tab:gray" for one in shown]
        steps = [1000 * one.step for one in shown]
        panel.barh([one.name for one in shown], steps, xerr=[below, above], color=colours, capsize=3)
        panel.set(title=model, xlabel="milliseconds per step")
