"""What a run costs frameworks that train on it: each of them alone and with Unisono, both alive at once, in turns."""

import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.crew import Crew
from benchmarks.elastic_job import Job, launched
from benchmarks.figures import times_as_long
from benchmarks.frameworks import COMPARISONS, PLAIN
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.side_by_side import batch_for, names, one_round, turn_seconds

PROGRAM = "benchmarks.programs.framework"

Found = Mapping[str, Sequence[Sequence[float]]]
"""By way, for each round: a step's seconds in each turn."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        comparisons: names in ``COMPARISONS``.
        step_ms: how long a step of a framework alone is to take, about; decides the batch.
        rounds: fresh processes of both ways.
        turns: of each way, in each round.
        turn_s: seconds of a turn, at least.
        seed: of who comes first.
        batch: the samples of a batch, if ``step_ms`` is not to decide them.
    """

    comparisons: tuple[str, ...] = tuple(COMPARISONS)
    step_ms: float = 50.0
    rounds: int = 5
    turns: int = 20
    turn_s: float = 1.5
    seed: int = 0
    batch: int | None = None


def run(choice: Choice) -> Report:
    """Measure one comparison after the other."""
    choice = replace(choice, turn_s=turn_seconds(choice.turn_s, choice.step_ms))
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    found: dict[str, tuple[int, Found]] = {}
    failures: list[str] = []
    for name in choice.comparisons:
        if not COMPARISONS[name].is_installed:
            continue
        try:
            found[name] = one_comparison(choice, name, meter, order)
        except (RuntimeError, TimeoutError) as failure:
            failures.append(f"{name}: {failure}")
    meter.calibrate()
    return Report(
        name="guests",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[grid(choice, found)],
        figures={"seconds": {name: seconds for name, (_, seconds) in found.items()}},
        failures=failures,
    )


def one_comparison(choice: Choice, name: str, meter: NoiseMeter, order: random.Random) -> tuple[int, Found]:
    """The batch, and a step's seconds by way."""
    one = COMPARISONS[name]
    batch = choice.batch or batch_for(choice.step_ms, 2 * one.workers, partial(starting, name, one.alone))
    found: dict[str, list[list[float]]] = {way: [] for way in one.ways}
    for _ in range(choice.rounds):
        meter.calibrate()
        start = partial(starting, name, batch=batch)
        for way, seconds in one_round(one.ways, start, choice.turns, choice.turn_s, order).items():
            found[way].append(seconds)
    return batch, found


@contextmanager
def starting(name: str, way: str, batch: int) -> Iterator[Job]:
    """One way: a process of its own, or several that torchrun starts."""
    one, threads = COMPARISONS[name], 1
    processes = one.workers
    if way == PLAIN:
        processes, threads = 1, one.workers
    with tempfile.TemporaryDirectory(prefix="benchmark-") as where:
        folder = Path(where) / "left"
        folder.mkdir()
        module = ["-m", PROGRAM, one.framework, way, str(batch), str(one.workers), str(folder)]
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={one.workers}"]
        variables = Crew.here(1, threads).settings | {"UNISONO_RUN_DIR": str(folder / "run")}
        if threads > 1:  # or one that waits for the other keeps it from its core, where others compute as well
            variables["OMP_WAIT_POLICY"] = "passive"
        with launched(module if processes == 1 else [*several, *module], variables, folder) as job:
            job.until(lambda: len(names(job)) == processes, "all workers train")
            yield job


def grid(choice: Choice, found: Mapping[str, tuple[int, Found]]) -> Grid:
    """For the screen."""
    rows = [row(name, batch, seconds) for name, (batch, seconds) in found.items()]
    return Grid(
        f"a step of a framework alone and with Unisono, in turns of at least {choice.turn_s:g} s, {choice.turns} in "
        f"each of {choice.rounds} rounds",
        ("", "batch", "alone", "with Unisono", "ratio", "plain loop", "beside it"),
        rows,
        (
            "Ratio: the median over turns side by side, with the interval of drawing rounds again.",
            "There are as many shards as workers; in stages four.",
            "Plain loop: of torch alone, in one process with as many threads as there are workers.",
        ),
    )


def row(name: str, batch: int, seconds: Found) -> tuple[str, ...]:
    """What was found in a comparison."""
    one = COMPARISONS[name]
    alone, ours, *plain = (seconds[way] for way in one.ways)
    words = [one.title, str(batch), _middle(alone), _middle(ours), f"{times_as_long(ours, alone):.3f}"]
    beside = [_middle(plain[0]), f"{times_as_long(ours, plain[0]):.3f}"] if plain else ["", ""]
    return *words, *beside


def _middle(runs: Sequence[Sequence[float]]) -> str:
    return f"{1000 * statistics.median(each for turns in runs for each in turns):.1f} ms"
