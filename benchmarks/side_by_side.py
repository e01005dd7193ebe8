"""Jobs that are alive at once and train in turns, so that a machine that gets slower or faster does so for all."""

import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import pairwise

import psutil

from benchmarks.elastic_job import Job

WARM_UP_STEPS = 20
SETTLING = 2
"""Steps that are not counted after a job was woken."""

STEPS_IN_A_TURN = 20
"""At least: so that enough are left of it when the machine stands still for a while."""

FIRST_BATCH = 64

Starting = AbstractContextManager[Job]
"""A job that trains when the block begins, and is ended with it."""


def turn_seconds(least_s: float, step_ms: float) -> float:
    """How long a turn is, for steps of about so many milliseconds."""
    return max(least_s, STEPS_IN_A_TURN * step_ms / 1000)


def batch_for(step_ms: float, whole: int, start: Callable[[int], Starting]) -> int:
    """The batch with which a step takes about as long as it is to take.

    Args:
        step_ms: how long that is.
        whole: the number of samples of which the batch is a multiple.
        start: starts a job with so many samples a batch.
    """
    batch = max(whole, FIRST_BATCH // whole * whole)
    for _ in range(2):  # what a step takes beside its samples, a larger batch takes once
        with start(batch) as job:
            await_steps(job, WARM_UP_STEPS)
            took = slowest_median(job, 0.0, time.time())
        batch = max(whole, round(batch * step_ms / 1000 / took / whole) * whole)
    return batch


def one_round(
    kinds: Sequence[str], start: Callable[[str], Starting], turns: int, turn_s: float, order: random.Random
) -> dict[str, list[float]]:
    """Fresh jobs, of which all but one sleep.

    Args:
        kinds: what is compared.
        start: starts a job of a kind.
        turns: the number of turns of each.
        turn_s: how long each turn is, at least.
        order: decides the order of the kinds, anew in each turn.

    Returns:
        a step's seconds in each turn, by kind.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for kind in order.sample(kinds, len(kinds)):
            jobs[kind] = stack.enter_context(start(kind))
            await_steps(jobs[kind], WARM_UP_STEPS)
            stack.callback(send, jobs[kind], signal.SIGCONT)  # before it is ended
            send(jobs[kind], signal.SIGSTOP)
        for _ in range(turns):
            for kind in order.sample(kinds, len(kinds)):
                send(jobs[kind], signal.SIGCONT)
                begin = time.time()
                time.sleep(turn_s)
                jobs[kind].until(partial(has_a_step, jobs[kind], begin), "every worker is awake again and trains")
                send(jobs[kind], signal.SIGSTOP)
                seconds[kind].append(slowest_median(jobs[kind], begin, time.time()))
    return seconds


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
