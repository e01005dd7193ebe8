"""What something costs: a job that does it beside one that does not, both alive at once, in turns."""

import random
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.elastic_job import PROGRAM, Job, running
from benchmarks.figures import times_as_long
from benchmarks.looking import looking
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.side_by_side import batch_for, names, one_round, turn_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Kind:
    """How a job is started.

    Attributes:
        options: of ``unisono run``.
        variables: in its environment.
    """

    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


PAIRS = {
    "elastic": {"fixed": Kind(), "elastic": Kind(("--max-restarts", "3"))},
    "monitor": {"alone": Kind(), "watched": Kind(variables={"UNISONO_MONITOR_EVERY": "1"})},
    "monitor-all": {"alone": Kind(), "all read": Kind(variables={"BENCHMARK_ONE_IN": "1"})},
    "state": {"nothing": Kind(variables={"UNISONO_VERIFY_EVERY": "0"}), "compared": Kind()},
    "checks": {"none": Kind(variables={"UNISONO_CHECKS": "none"}), "some": Kind(variables={"UNISONO_CHECKS": "some"})},
    "checks-all": {
        "none": Kind(variables={"UNISONO_CHECKS": "none"}),
        "all": Kind(variables={"UNISONO_CHECKS": "all"}),
    },
    "timeline": {"off": Kind(), "on": Kind(variables={"UNISONO_TIMELINE": "1"})},
    "page": {"alone": Kind(("--max-restarts", "3")), "looked at": Kind(("--max-restarts", "3", "--page"))},
    "pinning": {"not pinned": Kind(("--no-pin",)), "pinned": Kind(("--pin",))},
    "audit": {"none": Kind(), "audited": Kind(variables={"UNISONO_AUDIT": "0.01"})},
}
"""What is compared; of each pair the second beside the first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        pair: a name in ``PAIRS``.
        model: a name in ``WORKLOADS``.
        workers: of each job.
        step_ms: how long a step is to take, about; decides the batch.
        rounds: fresh jobs of both kinds.
        turns: of each job, in each round.
        turn_s: seconds of a turn.
        seed: of who comes first.
        busy: processes of others, each of which keeps a core busy.
    """

    pair: str = "elastic"
    model: str = "narrow"
    workers: int = 2
    step_ms: float = 50.0
    rounds: int = 5
    turns: int = 20
    turn_s: float = 1.5
    seed: int = 0
    busy: int = 0

    @property
    def kinds(self) -> list[str]:
        """What is compared, the baseline first."""
        return list(PAIRS[self.pair])


def run(choice: Choice) -> Report:
    """Both jobs are there at once, and one of them sleeps."""
    choice = replace(choice, turn_s=turn_seconds(choice.turn_s, choice.step_ms))
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    batch = batch_for(choice.step_ms, 2 * choice.workers, partial(starting, choice, choice.kinds[0]))
    found: dict[str, list[list[float]]] = {kind: [] for kind in choice.kinds}
    for _ in range(choice.rounds):
        meter.calibrate()
        start = partial(starting, choice, batch=batch)
        with others(choice.busy):
            measured = one_round(choice.kinds, start, choice.turns, choice.turn_s, order)
        for kind, seconds in measured.items():
            found[kind].append(seconds)
    return Report(
        name=choice.pair,
        settings=asdict(choice) | {"batch": batch},
        noise=meter.read(),
        grids=[grid(choice, batch, found)],
        figures={"seconds": found},
    )


@contextmanager
def starting(choice: Choice, kind: str, batch: int) -> "Iterator[Job]":
    """A job of this kind."""
    script = [*PROGRAM, choice.model, str(2 * choice.workers), "sgd", str(batch)]
    one = PAIRS[choice.pair][kind]
    with running(["-n", str(choice.workers), *one.options], script, one.variables) as job:
        job.until(lambda: len(names(job)) == choice.workers, "all workers train")
        with looking(job) if "--page" in one.options else nullcontext():
            yield job


BUSY = (
    "import sys, threading; threading.Thread(target=sys.stdin.read).start()\nwhile threading.active_count() > 1: pass"
)


@contextmanager
def others(processes: int) -> "Iterator[None]":
    """As long as the context lasts, so many processes use whatever core they get."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.communicate()


def grid(choice: Choice, batch: int, found: dict[str, list[list[float]]]) -> Grid:
    """For the screen."""
    middle = {kind: statistics.median(each for turns in runs for each in turns) for kind, runs in found.items()}
    baseline, other = choice.kinds
    ratio = times_as_long(found[other], found[baseline])
    row = (choice.model, str(batch), *(f"{1000 * middle[kind]:.1f} ms" for kind in choice.kinds), f"{ratio:.4f}")
    return Grid(
        f"a step of {choice.workers} workers; the two kinds in turns of {choice.turn_s:g} s, {choice.turns} in each of "
        f"{choice.rounds} rounds",
        ("", "batch", *choice.kinds, f"{other} / {baseline}"),
        [row],
        ("Ratio: the median over turns side by side, with the interval of drawing rounds again.",),
    )
