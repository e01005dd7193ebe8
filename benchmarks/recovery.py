"""How long survivors stand still when a worker is killed, and how soon its replacement takes part."""

import os
import random
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
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
        way: of the replacement, by part: until it was asked for, could be taken in, the others stood at a boundary, it
            had their state, and had committed a step.
    """

    stall: float
    step: float
    replaced: float
    parts: dict[str, float] = field(default_factory=dict)
    way: dict[str, float] = field(default_factory=dict)


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
        return Recovery(after[0] - before - step, step, joined - at, parts, self.way(at, joined))

    def way(self, at: float, joined: float) -> dict[str, float]:
        """What a replacement spent its time with, from the kill at ``at`` to its first step."""
        later = [one for one in self.events() if seconds_of(one["time"]) > at]
        asked = next((one for one in later if one["event"] == "asked for"), None)
        minted = next((one for one in later if one["event"] == "minted" and one["joined"]), None)
        ends = (one for one in later if one["event"] == "formed")
        formed = next((one for one in ends if minted and one["generation"] == minted["generation"]), None)
        if asked is None or minted is None or formed is None:
            return {}
        taken = seconds_of(minted["time"])
        marks = {
            "asked": seconds_of(asked["time"]),
            "starts": taken - minted["seconds"],
            "boundary": taken,
            "state": seconds_of(formed["time"]),
            "first step": joined,
        }
        return {name: mark - before for (name, mark), before in zip(marks.items(), [at, *marks.values()], strict=False)}


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
        parts = _parts([one.parts for one in recoveries])
        rows.append(
            (
                model,
                f"{1000 * statistics.median(one.step for one in recoveries):.0f} ms",
                _milliseconds(stalls),
                f"{1000 * max(stalls):.0f} ms",
                parts,
                _milliseconds(replaced),
                f"{1000 * max(replaced):.0f} ms",
                _parts([one.way for one in recoveries]),
            )
        )
    return Grid(
        f"one of {choice.workers} workers is killed, {choice.kills} times; medians (95 % interval) and the worst",
        ("", "step after", "stall", "worst", "parts, ms", "replaced after", "worst", "its way, ms"),
        rows,
        ("Stall: from the last commit before the kill to the next, beyond a step of those who are left.",),
    )


def _parts(found: Sequence[Mapping[str, float]]) -> str:
    names = dict.fromkeys(name for one in found for name in one)
    middle = {name: statistics.median(one[name] for one in found if name in one) for name in names}
    return ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in middle.items())


def _milliseconds(values: list[float]) -> str:
    return f"{bootstrap([1000 * value for value in values], statistics.median):.0f} ms"
