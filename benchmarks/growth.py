"""How long those who train stand still when workers come and go, and what it costs them that one starts beside them."""

import bisect
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.elastic_job import CALM_STEPS, PROGRAM, Job, running, seconds_of
from benchmarks.figures import Ratio, bootstrap
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report

SIZES = (2, 4, 1)
"""Workers, one after the other, beginning with 1."""

SHARDS = 8
BUSY_S = 1.0
BUSY_STEPS = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        models: names in ``WORKLOADS``; trained with Adam, so that their state is three times as large.
        rounds: from 1 worker to 2, to 4, and back.
    """

    models: tuple[str, ...] = ("narrow", "mlp")
    rounds: int = 10


@dataclass(frozen=True, slots=True)
class Span:
    """What was done to a job, and for how long.

    Attributes:
        kind: ``calm``, ``busy`` (processes that only compute run beside it), ``resized``.
        begin: in seconds since 1970.
        end: of it. After a resize: when all trained together again.
        workers: before.
        more: processes beside them, or workers after a resize.
    """

    kind: Literal["calm", "busy", "resized"]
    begin: float
    end: float
    workers: int
    more: int


@dataclass(frozen=True, slots=True)
class Change:
    """A generation that others have followed, in seconds.

    Attributes:
        before: how many workers.
        after: how many.
        stall: of the survivors, beyond a step of the new roster: the longest.
        parts: of it.
    """

    before: int
    after: int
    stall: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Found:
    """What was found for a model.

    Attributes:
        steps: seconds of a calm step, by the number of workers.
        changes: in order.
        starting: how many times as long a step takes while workers start, for each growth, by the workers before.
        busy: the same while as many processes only compute.
    """

    steps: dict[int, float]
    changes: list[Change]
    starting: dict[int, list[float]] = field(default_factory=dict)
    busy: dict[int, list[float]] = field(default_factory=dict)


def run(choice: Choice) -> Report:
    """Measure, model by model."""
    meter = NoiseMeter()
    found = {model: one_model(choice, model) for model in choice.models}
    meter.calibrate()
    return Report(
        name="growth",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[stalls(choice, found), shares(found)],
        figures={"models": {model: asdict(one) for model, one in found.items()}},
    )


def one_model(choice: Choice, model: str) -> Found:
    """Grow and shrink."""
    options, program = ["-n", f"1:{max(SIZES)}"], [*PROGRAM, model, str(SHARDS), "adam"]
    with running(options, program) as job:
        job.until(lambda: bool(job.roster()), "training begins")
        job.control.resize(1)
        job.await_calm(1)
        spans, workers = [], 1
        for _ in range(choice.rounds):
            for size in SIZES:
                spans += disturbed(job, workers, size)
                workers = size
        return evaluated(job, spans)


def disturbed(job: Job, workers: int, size: int) -> list[Span]:
    """A calm time; a time with as many busy processes as workers are to come; another size."""
    begin, calm = calm_since(job, workers), time.time()
    spans = [Span("calm", begin, calm, workers, 0)]
    more = size - workers
    if more > 0:
        spans.append(beside(job, workers, more))
        job.await_calm(workers)
    asked = time.time()
    job.control.resize(size)
    job.await_calm(size)
    return [*spans, Span("resized", asked, time.time(), workers, size)]


def calm_since(job: Job, workers: int) -> float:
    """The time of the step with which the calm began."""
    return max(job.commits(worker)[-CALM_STEPS][1] for worker in job.await_calm(workers))


def beside(job: Job, workers: int, more: int) -> Span:
    """Processes that only compute, for some steps."""
    words = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(words) for _ in range(more)]
    try:
        begin, oldest = time.time(), job.roster()[0]
        reached = len(job.commits(oldest)) + BUSY_STEPS
        job.until(lambda: len(job.commits(oldest)) >= reached and time.time() > begin + BUSY_S, "some steps")
        return Span("busy", begin, job.commits(oldest)[-1][1], workers, more)
    finally:
        for other in others:
            other.kill()
            other.wait()


# -- what it comes to: pure, but for the files


def evaluated(job: Job, spans: Sequence[Span]) -> Found:
    """What the job's files say of these spans."""
    minted, formed = job.journal("minted"), {one["generation"]: one for one in job.journal("formed")}
    names = {worker for one in minted for worker in one["workers"]}
    times = {worker: [at for _, at in job.commits(worker)] for worker in names}
    oldest = minted[-1]["workers"][0]
    found = Found(calm_steps(times[oldest], spans), [])
    begun = spans[0].begin
    for old, new in itertools.pairwise(minted):
        if seconds_of(new["time"]) > begun and new["generation"] in formed:
            found.changes.append(change(old, new, formed[new["generation"]], times, found.steps))
    for span in spans:
        calm = found.steps[span.workers]
        if span.kind == "busy":
            found.busy.setdefault(span.workers, []).append(slowed(times[oldest], span.begin, span.end, calm))
        elif span.kind == "resized" and span.more > span.workers:
            first = next(one for one in minted if seconds_of(one["time"]) > span.begin)
            ready = seconds_of(first["time"]) - first["seconds"]
            found.starting.setdefault(span.workers, []).append(slowed(times[oldest], span.begin, ready, calm))
    return found


def calm_steps(times: Sequence[float], spans: Sequence[Span]) -> dict[int, float]:
    """The median of a calm step, by the number of workers; between two numbers that were looked at, their mean."""
    steps: dict[int, list[float]] = {}
    for span in spans:
        if span.kind == "calm":
            inside = [at for at in times if span.begin <= at <= span.end]
            steps.setdefault(span.workers, []).extend(b - a for a, b in itertools.pairwise(inside))
    medians = {workers: statistics.median(found) for workers, found in steps.items()}
    for workers in range(min(medians), max(medians)):
        lower = max(one for one in medians if one <= workers)
        upper = min(one for one in medians if one >= workers)
        medians[workers] = (medians[lower] + medians[upper]) / 2
    return medians


def change(
    old: dict[str, Any],
    new: dict[str, Any],
    formed: dict[str, Any],
    times: dict[str, list[float]],
    steps: dict[int, float],
) -> Change:
    """How long the survivors of a generation waited for their first step in the next."""
    at, step = seconds_of(new["time"]), steps[len(new["workers"])]
    gaps = [gap(times[worker], at) for worker in old["workers"] if worker in new["workers"]]
    last, first = max(gaps, key=lambda one: one[1] - one[0])
    parts = {**formed["seconds"], "first step": first - seconds_of(formed["time"]) - step}
    return Change(len(old["workers"]), len(new["workers"]), first - last - step, parts)


def gap(times: Sequence[float], at: float) -> tuple[float, float]:
    """The steps before and after a moment."""
    place = bisect.bisect(times, at)
    return times[place - 1], times[place]


def slowed(times: Sequence[float], begin: float, end: float, calm: float) -> float:
    """How many times as long as a calm one a step took in this time, in which parts of steps count as such."""
    return (end - begin) / calm / max(progress(times, end) - progress(times, begin), 1e-9)


def progress(times: Sequence[float], at: float) -> float:
    """How many steps were done by then, with the part of the one that was under way."""
    place = min(max(bisect.bisect(times, at), 1), len(times) - 1)
    before, after = times[place - 1], times[place]
    return place - 1 + (at - before) / (after - before)


# -- for the screen


def stalls(choice: Choice, found: dict[str, Found]) -> Grid:
    """A row for each model and each kind of change."""
    rows = []
    for model, one in found.items():
        for kind in ("grows", "shrinks"):
            changes = [each for each in one.changes if (each.after > each.before) == (kind == "grows")]
            stalled = [each.stall for each in changes]
            parts = ", ".join(
                f"{part} {1000 * statistics.median(each.parts[part] for each in changes):.0f}"
                for part in changes[0].parts
                if all(part in each.parts for each in changes)
            )
            shown = f"{1000 * max(stalled):.0f} ms"
            rows.append((f"{model} {kind}", str(len(changes)), milliseconds(stalled), shown, parts))
    return Grid(
        f"1, 2, 4 and 1 workers, {choice.rounds} times; medians (95 % interval) and the worst",
        ("", "changes", "stall", "worst", "parts, ms"),
        rows,
        (
            "Stall: from the survivors' last step in one generation to their first in the next, beyond a calm step of "
            "the new roster.",
            *(
                f"{model}: calm steps of "
                + ", ".join(f"{1000 * step:.0f} ms ({workers})" for workers, step in sorted(one.steps.items()))
                for model, one in found.items()
            ),
        ),
    )


def shares(found: dict[str, Found]) -> Grid:
    """What a start beside them costs, and what it would cost if it only computed."""
    rows = []
    for model, one in found.items():
        for workers in sorted(one.starting):
            starting, busy = one.starting[workers], one.busy[workers]
            rows.append((f"{model}, {workers} at work", median(starting), median(busy), quotient(starting, busy)))
    return Grid(
        "a step while workers start, and while as many processes only compute; of a calm one",
        ("", "workers start", "processes compute", "ratio"),
        rows,
    )


def quotient(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Of the medians, round by round."""
    rounds = list(zip(ours, theirs, strict=True))
    ratio = bootstrap(
        rounds, lambda drawn: statistics.median(a for a, _ in drawn) / statistics.median(b for _, b in drawn)
    )
    return f"{ratio:.2f}"


def median(values: Sequence[float]) -> str:
    """With its interval."""
    return f"{bootstrap(list(values), statistics.median):.2f}"


def milliseconds(values: Sequence[float]) -> str:
    """Of seconds: the median with its interval."""
    ratio: Ratio = bootstrap([1000 * value for value in values], statistics.median)
    return f"{ratio:.0f} ms"
