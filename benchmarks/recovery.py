"""How long survivors stand still when a worker is killed, and how soon its replacement takes part."""

import os
import random
import signal
import statistics
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from benchmarks.elastic_job import PROGRAM, Job, running, seconds_of
from benchmarks.figures import bootstrap
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        models: names in ``WORKLOADS``.
        workers: that train together.
        kills: of one of them, one after the other.
        seed: of who is killed.
    """

    models: tuple[str, ...] = ("tiny", "mlp")
    workers: int = 3
    kills: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """What followed a kill, in seconds.

    Attributes:
        stall: from the survivors' last commit before it to their next, beyond a step of those who are left.
        step: of those who are left.
        replaced: until a new worker committed a step with the others.
        parts: of the stall, as the journal has them.
    """

    stall: float
    step: float
    replaced: float
    parts: dict[str, float] = field(default_factory=dict)


class Watched(Job):
    """A job that trains until it is stopped, and whose workers are killed."""

    def kill(self, victim: str, roster: list[str]) -> float:
        """Kill a worker; returns when, once the others have gone on."""
        pid, survivors = self.pid(victim), [worker for worker in roster if worker != victim]
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: all(self.commits(worker)[-1][1] > at + 1.0 for worker in survivors), "the others go on")
        return at

    def recovery(self, at: float, roster: list[str], victim: str, until: float) -> Recovery:
        """What followed a kill: before ``until`` nothing else happened."""
        survivor = next(worker for worker in roster if worker != victim)
        commits = self.commits(survivor)
        before = max(when for _, when in commits if when <= at)
        after = [when for _, when in commits if when > at]
        fresh = [
            when
            for path in self.folder.glob("commits-*.txt")
            for _, when in self.commits(path.stem.removeprefix("commits-"))[:1]
            if at < when <= until
        ]
        joined = min(fresh, default=until)
        steps = [right - left for left, right in pairwise(after) if right <= joined]
        step = statistics.median(steps or [0.0])
        parts = next(line["seconds"] for line in self.journal("formed") if seconds_of(line["time"]) > at)
        return Recovery(after[0] - before - step, step, joined - at, parts)


def run(choice: Choice) -> Report:
    """Measure, model by model."""
    meter = NoiseMeter()
    found = {model: one_model(choice, model) for model in choice.models}
    meter.calibrate()
    return Report(
        name="recovery",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[grid(choice, found)],
        figures={"models": {model: [asdict(one) for one in recoveries] for model, recoveries in found.items()}},
    )


def one_model(choice: Choice, model: str) -> list[Recovery]:
    """Kill one worker after the other."""
    order = random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    kills = []
    options = ["-n", str(choice.workers), "--max-restarts", str(choice.kills)]
    with running(options, [*PROGRAM, model, str(2 * choice.workers)]) as started:
        job = Watched(started.folder, started.launcher)
        for _ in range(choice.kills):
            roster = job.await_calm(choice.workers)
            victim = order.choice(roster)
            kills.append((job.kill(victim, roster), roster, victim))
        job.await_calm(choice.workers)
        ends = [at for at, _, _ in kills[1:]] + [time.time()]
        return [job.recovery(*kill[:2], kill[2], end) for kill, end in zip(kills, ends, strict=True)]


def grid(choice: Choice, found: dict[str, list[Recovery]]) -> Grid:
    """For the screen."""
    rows = []
    for model, recoveries in found.items():
        stalls, replaced = [one.stall for one in recoveries], [one.replaced for one in recoveries]
        parts = ", ".join(
            f"{part} {1000 * statistics.median(one.parts.get(part, 0.0) for one in recoveries):.0f}"
            for part in recoveries[0].parts
        )
        rows.append(
            (
                model,
                f"{1000 * statistics.median(one.step for one in recoveries):.0f} ms",
                _milliseconds(stalls),
                f"{1000 * max(stalls):.0f} ms",
                parts,
                _milliseconds(replaced),
                f"{1000 * max(replaced):.0f} ms",
            )
        )
    return Grid(
        f"one of {choice.workers} workers is killed, {choice.kills} times; medians (95 % interval) and the worst",
        ("", "step after", "stall", "worst", "parts, ms", "replaced after", "worst"),
        rows,
        ("Stall: from the last commit before the kill to the next, beyond a step of those who are left.",),
    )


def _milliseconds(values: list[float]) -> str:
    return f"{bootstrap([1000 * value for value in values], statistics.median):.0f} ms"
