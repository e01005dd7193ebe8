"""The all-reduce alone: shared memory beside Gloo, and beside what the memory's bandwidth allows."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.crew import Allocator, Crew
from benchmarks.figures import Ratio, counted, slowest_turns, times_as_fast
from benchmarks.harness import Entry, measure
from benchmarks.noise import NoiseMeter
from benchmarks.programs.exchange import WAYS, Exchange, Exchanged
from benchmarks.report import Grid, Report

SIZES = (4, 2**12, 2**16, 2**20, 25 * 2**20, 100 * 2**20)


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run: between how many workers, what sizes in bytes, how often."""

    workers: int = 2
    sizes: tuple[int, ...] = SIZES
    rounds: int = 5
    turns: int = 9
    allocator: Allocator = "tuned"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """What was found about one size.

    Attributes:
        size: bytes.
        seconds: of a call, by way: one figure for each run.
        of_gloo: how many times as fast as Gloo.
        of_bound: the share of the memory's bandwidth.
    """

    size: int
    seconds: dict[str, list[float]]
    of_gloo: Ratio
    of_bound: Ratio

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        times = [shown_time(statistics.median(self.seconds[way])) for way in WAYS]
        return (shown_size(self.size), *times, f"{self.of_gloo:.2f}", f"{self.of_bound:.0%}")


def run(choice: Choice) -> Report:
    """Measure all sizes."""
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    task = Exchange(sizes=choice.sizes, turns=choice.turns, seed=choice.seed)
    crew = Crew.here(choice.workers, 1, choice.allocator)
    (found,) = measure([Entry("all-reduce", crew, "exchange", task, Exchanged)], choice.rounds, meter, order)
    meter.calibrate()
    rows = [row(size, found.runs) for size in choice.sizes] if found.runs else []
    right = all(worker.is_right for one in found.runs for worker in one)
    return Report(
        name="allreduce",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[grid(choice, rows, right=right)],
        figures={"rows": [asdict(one) for one in rows], "all_sums_right": right},
        failures=[found.failure] if found.failure else [],
        draw=lambda figure: draw(figure, rows),
    )


def row(size: int, runs: Sequence[Sequence[Exchanged]]) -> Row:
    """What the runs say about one size. Pure."""
    seconds = {
        way: [statistics.median(slowest_turns([worker.seconds[size][way] for worker in one])) for one in runs]
        for way in WAYS
    }
    ours, gloo, bound = (seconds[way] for way in WAYS)
    return Row(size, seconds, times_as_fast(ours, gloo), times_as_fast(ours, bound))


def grid(choice: Choice, rows: Sequence[Row], *, right: bool) -> Grid:
    """For the screen."""
    return Grid(
        f"all-reduce of float32 between {counted(choice.workers, 'worker')}; {counted(choice.rounds, 'fresh crew')}; "
        f"vs: how many times as fast (95 % interval)",
        ("size", *WAYS, "vs Gloo", "of bound"),
        [one.cells() for one in rows],
        (
            f"Bound: each worker adds its 1/{choice.workers} of all inputs into its 1/{choice.workers} of the result, "
            f"in memory of its own, without waiting for anybody.",
            "All sums were right." if right else "SOME SUMS WERE WRONG.",
        ),
    )


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Time over size, both logarithmic."""
    figure.set_size_inches(6, 4.5)
    panel = figure.subplots()
    for way, style in zip(WAYS, ("o-", "s-", "k--"), strict=True):
        milliseconds = [1000 * statistics.median(one.seconds[way]) for one in rows]
        panel.plot([one.size for one in rows], milliseconds, style, label=way)
    panel.set(xscale="log", yscale="log", xlabel="bytes", ylabel="milliseconds", title="all-reduce")
    panel.legend()


def shown_size(size: int) -> str:
    """Bytes, in the unit that people say."""
    for unit, name in ((10**6, "MB"), (10**3, "KB")):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size} B"


def shown_time(seconds: float) -> str:
    """Milliseconds, or microseconds where there are few."""
    return f"{1000 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
