"""What exactness costs: more shards than workers, exact beside native, and one worker beside the plain loop."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.crew import Allocator, Crew
from benchmarks.figures import Ratio, counted, difference, mean_of_workers, slowest_turns, times_as_long
from benchmarks.harness import Entry, measure
from benchmarks.noise import NoiseMeter
from benchmarks.programs.turns import Taken, Turns
from benchmarks.report import Grid, Report
from benchmarks.task import Option, Task, Update
from benchmarks.workloads import WORKLOADS


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        models: names in ``WORKLOADS``.
        workers: of the crew.
        rounds: fresh crews.
        turns: of each loop in a crew.
        steps: in a turn.
        update: torch's implementation of SGD.
        allocator: of all processes.
        seed: of the order.
    """

    models: tuple[str, ...] = ("resnet", "gpt")
    workers: int = 2
    rounds: int = 5
    turns: int = 8
    steps: int = 3
    update: Update = "default"
    allocator: Allocator = "tuned"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Loop:
    """Something that takes turns with others.

    Attributes:
        name: for people.
        contender: a module of ``benchmarks.contenders``.
        options: its own.
    """

    name: str
    contender: str = "unisono"
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Race:
    """Loops that take turns in one crew; the first is what the others are compared with."""

    title: str
    workers: int
    loops: tuple[Loop, ...]


def races(workers: int) -> list[Race]:
    """The questions: how many shards, exact or native, what Unisono adds to the plain loop, what small batches cost."""
    shards = [
        Loop(f"exact, V = {factor * workers}", options={"shards": factor * workers, "reduction": "exact"})
        for factor in (1, 2, 4)
    ]
    over_gloo: dict[str, Option] = {"shards": workers, "transport": "process_group"}
    ways = (
        Loop(f"native, V = {workers}, Gloo", options={"reduction": "native", "shards": workers}),
        Loop(f"exact, V = {workers}, Gloo", options={"reduction": "exact", **over_gloo}),
        Loop(f"exact, V = {workers}, shared memory", options={"reduction": "exact", "shards": workers}),
    )
    alone = (Loop("plain loop", "plain"), Loop("exact, V = 1", options={"shards": 1}))
    passes = tuple(
        Loop(f"plain loop, {factor * workers} passes", "plain", {"passes": factor * workers}) for factor in (1, 2, 4)
    )
    return [
        Race(f"number of shards V, {workers} workers", workers, tuple(shards)),
        Race(f"exact beside native, {workers} workers", workers, ways),
        Race("1 worker beside the plain loop", 1, alone),
        Race("what batches as small as a shard cost without Unisono, 1 worker", 1, passes),
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """What was found about one loop.

    Attributes:
        name: of the loop.
        seconds: of a step: for each run, each turn.
        ratio: how many times as long as the first loop of its race.
        difference: the largest relative difference of the first losses from those of the first loop.
    """

    name: str
    seconds: list[list[float]]
    ratio: Ratio
    difference: float

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        middle = statistics.median(statistics.median(turns) for turns in self.seconds)
        apart = f"{self.difference:.0e} apart" if self.difference else "identical"
        return (self.name, f"{1000 * middle:.2f} ms", f"{self.ratio:.3f}", apart)


def run(choice: Choice, name: str = "shards", run_by: Callable[[int], Sequence[Race]] = races) -> Report:
    """Measure all races on all models.

    Args:
        choice: how.
        name: of the report.
        run_by: which races there are with so many workers.
    """
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    planned = [(model, race) for model in choice.models for race in run_by(choice.workers)]
    found = measure([entry(choice, model, race) for model, race in planned], choice.rounds, meter, order)
    meter.calibrate()
    results = [
        (model, race, rows(race, one.runs))
        for (model, race), one in zip(planned, found, strict=True)
        if one.runs and not one.failure
    ]
    return Report(
        name=name,
        settings=asdict(choice),
        noise=meter.read(),
        grids=[grid(choice, model, race, table) for model, race, table in results],
        figures={
            "races": [
                {"model": model, "title": race.title, "workers": race.workers, "rows": [asdict(row) for row in table]}
                for model, race, table in results
            ]
        },
        failures=[one.failure for one in found if one.failure],
        draw=lambda figure: draw(figure, results),
    )


def entry(choice: Choice, model: str, race: Race) -> Entry[Taken]:
    """What is run for a race."""
    loops = tuple(
        Task(
            contender=loop.contender,
            options=dict(loop.options),
            workload=model,
            batch_size=WORKLOADS[model].batch_size,
            update=choice.update,
            steps=choice.steps,
        )
        for loop in race.loops
    )
    task = Turns(loops=loops, turns=choice.turns, seed=choice.seed)
    crew = Crew.here(race.workers, 1, choice.allocator)
    return Entry(f"{model}, {race.title}", crew, "turns", task, Taken)


def rows(race: Race, runs: Sequence[Sequence[Taken]]) -> list[Row]:
    """What the runs of a race say. Pure."""
    seconds = [
        [slowest_turns([worker.seconds[number] for worker in one]) for one in runs] for number in range(len(race.loops))
    ]
    losses = [mean_of_workers([worker.losses[number] for worker in runs[0]]) for number in range(len(race.loops))]
    return [
        Row(loop.name, took, times_as_long(took, seconds[0]), difference(lost, losses[0]))
        for loop, took, lost in zip(race.loops, seconds, losses, strict=True)
    ]


def grid(choice: Choice, model: str, race: Race, table: Sequence[Row]) -> Grid:
    """For the screen."""
    title = (
        f"{model}, batch {WORKLOADS[model].batch_size}: {race.title}; "
        f"{counted(choice.rounds, 'fresh crew')}, {choice.turns} turns of {counted(choice.steps, 'step')} each"
    )
    notes = [f"Ratio: times as long as '{race.loops[0].name}' in the same turn (95 % interval)."]
    if WORKLOADS[model].batch_norm and len({loop.options.get("shards") for loop in race.loops}) > 1:
        notes.append("BatchNorm takes its statistics over a shard, so losses depend on V by more than rounding.")
    return Grid(title, ("", "step", "ratio", "losses"), [row.cells() for row in table], tuple(notes))


def draw(figure: Any, results: Sequence[tuple[str, Race, Sequence[Row]]]) -> None:
    """The ratios with their intervals, a panel for each race of each model."""
    figure.set_size_inches(6, 1.2 * len(results) + 1)
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for panel, (model, race, table) in zip(panels, results, strict=True):
        shown = table[::-1]
        values = [row.ratio.value for row in shown]
        reach = [
            [row.ratio.value - row.ratio.low for row in shown],
            [row.ratio.high - row.ratio.value for row in shown],
        ]
        panel.errorbar(values, [row.name for row in shown], xerr=reach, fmt="o", capsize=3)
        panel.axvline(1, color="tab:gray", linewidth=0.8)
        panel.set_title(f"{model}: {race.title}", fontsize="small")
        panel.margins(y=0.3)
