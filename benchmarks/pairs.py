"""What something costs: a job that does it beside one that does not, both alive at once, in turns."""

import random
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import psutil

from benchmarks.elastic_job import PROGRAM, Job, running
from benchmarks.figures import times_as_long
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report

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
    "audit": {"none": Kind(), "audited": Kind(variables={"UNISONO_AUDIT": "0.01"})},
}
"""What is compared; of each pair the second beside the first."""

WARM_UP_STEPS = 20
SETTLING = 2
"""Steps that are not counted after a job was woken."""

STEPS_IN_A_TURN = 20
"""At least: so that enough are left of it when the machine stands still for a while."""

FIRST_BATCH = 64


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
    """

    pair: str = "elastic"
    model: str = "narrow"
    workers: int = 2
    step_ms: float = 50.0
    rounds: int = 5
    turns: int = 20
    turn_s: float = 1.5
    seed: int = 0

    @property
    def kinds(self) -> list[str]:
        """What is compared, the baseline first."""
        return list(PAIRS[self.pair])


def run(choice: Choice) -> Report:
    """Both jobs are there at once, and one of them sleeps."""
    choice = replace(choice, turn_s=max(choice.turn_s, STEPS_IN_A_TURN * choice.step_ms / 1000))
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    batch = batch_for(choice)
    found: dict[str, list[list[float]]] = {kind: [] for kind in choice.kinds}
    for _ in range(choice.rounds):
        meter.calibrate()
        for kind, seconds in one_round(choice, batch, order).items():
            found[kind].append(seconds)
    return Report(
        name=choice.pair,
        settings=asdict(choice) | {"batch": batch},
        noise=meter.read(),
        grids=[grid(choice, batch, found)],
        figures={"seconds": found},
    )


def batch_for(choice: Choice) -> int:
    """The batch with which a step takes about as long as it is to take: as many times the first one."""
    with starting(choice, choice.kinds[0], FIRST_BATCH) as job:
        await_steps(job, WARM_UP_STEPS)
        took = slowest_median(job, 0.0, time.time())
    whole = 2 * choice.workers
    return max(whole, round(FIRST_BATCH * choice.step_ms / 1000 / took / whole) * whole)


def one_round(choice: Choice, batch: int, order: random.Random) -> dict[str, list[float]]:
    """Fresh jobs; a step's seconds in each turn."""
    seconds: dict[str, list[float]] = {kind: [] for kind in choice.kinds}
    with ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for kind in order.sample(choice.kinds, len(choice.kinds)):
            jobs[kind] = stack.enter_context(starting(choice, kind, batch))
            await_steps(jobs[kind], WARM_UP_STEPS)
            stack.callback(send, jobs[kind], signal.SIGCONT)  # before it is ended
            send(jobs[kind], signal.SIGSTOP)
        for _ in range(choice.turns):
            for kind in order.sample(choice.kinds, len(choice.kinds)):
                send(jobs[kind], signal.SIGCONT)
                begin = time.time()
                time.sleep(choice.turn_s)
                jobs[kind].until(partial(has_a_step, jobs[kind], begin), "every worker is awake again and trains")
                send(jobs[kind], signal.SIGSTOP)
                seconds[kind].append(slowest_median(jobs[kind], begin, time.time()))
    return seconds


@contextmanager
def starting(choice: Choice, kind: str, batch: int) -> "Iterator[Job]":
    """A job of this kind."""
    script = [*PROGRAM, choice.model, str(2 * choice.workers), "sgd", str(batch)]
    one = PAIRS[choice.pair][kind]
    with running(["-n", str(choice.workers), *one.options], script, one.variables) as job:
        job.until(lambda: len(names(job)) == choice.workers, "all workers train")
        yield job


def send(job: Job, number: signal.Signals) -> None:
    """Have all processes of a job stop, or go on. Not the guard: it ends the others if this process is killed."""
    assert job.launcher is not None
    launcher = psutil.Process(job.launcher.pid)
    for one in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            if not any(word.endswith("guard.py") for word in one.cmdline()):
                one.send_signal(number)


def await_steps(job: Job, steps: int) -> None:
    """Wait for so many."""
    job.until(lambda: all(len(job.commits(name)) >= steps for name in names(job)), f"{steps} steps")


def names(job: Job) -> list[str]:
    """Of the workers."""
    return [path.stem.removeprefix("commits-") for path in job.folder.glob("commits-*.txt")]


def has_a_step(job: Job, begin: float) -> bool:
    """Whether every worker has committed enough since then to tell how long a step takes: a busy machine is slow."""
    return all(sum(at >= begin for _, at in job.commits(name)) >= SETTLING + 2 for name in names(job))


def slowest_median(job: Job, begin: float, end: float) -> float:
    """A step's seconds in a time, of the worker for which it took longest."""
    return max(median_step([at for _, at in job.commits(name)], begin, end) for name in names(job))


def median_step(times: Sequence[float], begin: float, end: float) -> float:
    """A step's seconds in a time, without those in which the job had just been woken."""
    inside = [at for at in times if begin <= at <= end][SETTLING:]
    return statistics.median(after - before for before, after in pairwise(inside))


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
