"""Elastic jobs that are recorded: workers are killed, joined by others, and their number is changed, at given steps."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.elastic_job import PROGRAM, Job, launched, running, seconds_of

SLEPT = ("-m", "benchmarks.programs.slept")
LONGEST_S = 240.0
"""Of a run, from its start to its end."""


@dataclass(frozen=True, slots=True)
class Blow:
    """What is done to a job.

    Attributes:
        step: the number of steps that are done by then.
        verb: kill, resize or join.
        number: the rank that is killed, the number of workers asked for, or those of the host that joins.
    """

    step: int
    verb: Literal["kill", "resize", "join"]
    number: int


def kill(step: int, rank: int) -> Blow:
    """The process of a worker is killed."""
    return Blow(step, "kill", rank)


def resize(step: int, workers: int) -> Blow:
    """So many workers are asked for."""
    return Blow(step, "resize", workers)


def join(step: int, workers: int) -> Blow:
    """A host with room for so many workers joins."""
    return Blow(step, "join", workers)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A job to record.

    Attributes:
        name: what it is called.
        begin: the number of workers to begin with.
        most: the most workers; with joins, on the first host they are those to begin with.
        shards: the number of shards.
        steps: the number of steps.
        known: the number of steps of the first part, from which the rest is predicted.
        blows: what is done to it, in order.
        shard_ms: milliseconds that a shard sleeps; 0 if it is computed.
        model: what is trained, a name in ``WORKLOADS``; for shards that are computed.
        batch_size: samples in a global batch, for shards that are computed.
        checkpoint_every: steps from one checkpoint to the next.
        fewest: the fewest workers that it may go on with; 0 for as many as it begins with.
    """

    name: str
    begin: int
    most: int
    shards: int
    steps: int
    known: int
    blows: tuple[Blow, ...]
    shard_ms: float = 0.0
    model: str = ""
    batch_size: int = 0
    checkpoint_every: int = 20
    fewest: int = 0

    @property
    def joins(self) -> bool:
        """Whether hosts join."""
        return any(blow.verb == "join" for blow in self.blows)

    @property
    def least(self) -> int:
        """The fewest workers that it goes on with."""
        return 1 if self.joins else self.fewest or self.begin

    @property
    def script(self) -> list[str]:
        """What is started, with its arguments."""
        if self.shard_ms:
            return [*SLEPT, str(self.shards), f"{self.shard_ms:g}", str(self.steps)]
        return [*PROGRAM, self.model, str(self.shards), "sgd", str(self.batch_size), str(self.steps)]

    @property
    def options(self) -> list[str]:
        """Of ``unisono run``."""
        found = ["--max-restarts", "100", "--checkpoint-every", str(self.checkpoint_every)]
        if self.joins:
            found += ["--threads", "1"]  # workers of hosts that are one share its cores
            return [
                "-n",
                f"{self.least}:{self.most}",
                "--coordinator",
                "127.0.0.1:0",
                "--here",
                str(self.begin),
                *found,
            ]
        threads = os.cpu_count() if self.begin < self.most else 1  # so many that no more workers fit to begin with
        return ["-n", f"{self.least}:{self.most}", "--threads", str(threads), *found]


SLEEPING: tuple[RunPlan, ...] = (
    RunPlan("kill", 4, 8, 16, 120, 40, (kill(10, 1), kill(60, 2)), 40),
    RunPlan("kill the first", 4, 8, 16, 120, 40, (kill(10, 2), kill(60, 0)), 40),
    RunPlan("kill two", 4, 8, 16, 120, 40, (kill(10, 1), kill(60, 1), kill(60, 3)), 40),
    RunPlan("kill often", 8, 16, 32, 140, 40, (kill(10, 1), kill(50, 7), kill(70, 3), kill(90, 5), kill(110, 0)), 30),
    RunPlan("kill of 5", 5, 8, 16, 120, 40, (kill(10, 4), kill(70, 1)), 30),
    RunPlan("kill of 6", 6, 8, 24, 120, 40, (kill(10, 5), kill(80, 1)), 30),
    RunPlan("2 to 4", 2, 4, 8, 120, 40, (kill(10, 1), resize(50, 4)), 40),
    RunPlan("2 to 4, long shards", 2, 4, 8, 48, 16, (kill(5, 1), resize(20, 4)), 150),
    RunPlan("2 to 4, short shards", 2, 4, 16, 240, 80, (kill(20, 1), resize(100, 4)), 10),
    RunPlan("3 to 6", 3, 6, 24, 120, 40, (kill(10, 2), resize(50, 6)), 20),
    RunPlan("4 to 8", 4, 8, 16, 140, 40, (kill(10, 1), resize(50, 8)), 40),
    RunPlan("4 to 8 to 4", 4, 8, 16, 140, 40, (kill(10, 1), resize(50, 8), resize(100, 4)), 40),
    RunPlan("4 to 8, and a kill", 4, 8, 16, 160, 40, (kill(10, 1), resize(50, 8), kill(90, 5)), 40),
    RunPlan("4 to 8, checkpoints", 4, 8, 16, 140, 40, (kill(10, 1), resize(50, 8)), 40, checkpoint_every=5),
    RunPlan("6 to 12", 6, 12, 24, 140, 40, (kill(10, 1), resize(50, 12)), 40),
    RunPlan("8 to 16", 8, 16, 32, 140, 40, (kill(10, 3), resize(50, 16)), 40),
    RunPlan("8 to 16 to 8, a kill", 8, 16, 32, 160, 40, (kill(10, 3), resize(50, 16), kill(80, 9), resize(120, 8)), 40),
    RunPlan("2 and 2 join", 2, 4, 8, 260, 40, (kill(10, 1), join(42, 2)), 40),
    RunPlan("4 and 4 join", 4, 8, 16, 260, 40, (kill(10, 1), join(42, 4)), 40),
    RunPlan("4 and 4 join, a kill", 4, 8, 16, 320, 40, (kill(10, 1), join(42, 4), kill(260, 6)), 40),
    RunPlan("16 to 32", 16, 32, 64, 100, 30, (kill(10, 3), resize(40, 32)), 60),
)
"""Shards sleep, so that workers do not need more cores than there are."""

COMPUTING: tuple[RunPlan, ...] = tuple(
    RunPlan(name, begin, 2, 4, steps, 80, blows, model="narrow", batch_size=512, fewest=1)
    for name, begin, steps, blows in (
        ("kill, computing", 2, 240, (kill(20, 1), kill(120, 0))),
        ("2 to 1 to 2, computing", 2, 240, (kill(20, 1), resize(120, 1), resize(160, 2))),
        ("1 and 1 join, computing", 1, 320, (kill(20, 0), join(90, 1))),
    )
)
"""Real training on up to two workers."""

PLANS = (*SLEEPING, *COMPUTING)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A job that has ended.

    Attributes:
        plan: the plan.
        folder: the run folder.
        moments: when that was done to it which is planned, in seconds since 1970.
    """

    plan: RunPlan
    folder: Path
    moments: list[float] = field(default_factory=list)


def record(plan: RunPlan, folder: Path) -> Recorded:
    """Run a job to its end, and do to it what is planned.

    Raises:
        TimeoutError: it takes too long.
        RuntimeError: it fails.
    """
    found = Recorded(plan, folder)
    with running(plan.options, plan.script, folder=folder) as job, ExitStack() as hosts:
        for blow in plan.blows:
            job.until(lambda: steps_done(job) >= blow.step, f"step {blow.step} is done")  # noqa: B023  it is called here
            found.moments.append(_deal(job, plan, blow, hosts))
        assert job.launcher is not None
        code = job.launcher.wait(LONGEST_S)
        if code:
            raise RuntimeError(f"{plan.name} ended with {code}: {job.last_words}")
    return found


def _deal(job: Job, plan: RunPlan, blow: Blow, hosts: ExitStack) -> float:
    """Do it; returns when it was done."""
    match blow.verb:
        case "kill":
            pid = job.pid(job.roster()[blow.number])
            os.kill(pid, signal.SIGKILL)
            return time.time()
        case "resize":
            at = time.time()
            job.control.resize(blow.number)
            return at
        case "join":
            known = len(job.journal("agent joined"))
            hosts.enter_context(_host(job, plan, blow.number))
            job.until(lambda: len(job.journal("agent joined")) > known, "the host has joined")
            return seconds_of(job.journal("agent joined")[-1]["time"])


@contextmanager
def _host(job: Job, plan: RunPlan, workers: int) -> Iterator[Job]:
    """Another host, which is on this machine as well."""
    words = ["-m", "unisono", "join", "--run-dir", str(job.folder), "-n", str(workers)]
    words += ["--checkpoint-every", str(plan.checkpoint_every), "--threads", "1", *plan.script]  # as the first host
    with launched(words, {}, job.folder.with_name("joined")) as joined:
        yield joined


def steps_done(job: Job) -> int:
    """The number of steps that are recorded."""
    path = job.folder / "metrics.jsonl"
    if not path.exists():
        return 0
    lines = path.read_text().splitlines(keepends=True)
    return next((1 + int(json.loads(line)["step"]) for line in reversed(lines) if line.endswith("\n")), 0)
