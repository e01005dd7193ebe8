"""Half an hour with a fault every few seconds: what grows meanwhile, and whether the bits are right in the end."""

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks.elastic_job import LOOK_S, Job, running
from benchmarks.family import Family, Sample, growth_per_hour
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from unisono.errors import JobError, LaunchError

Kind = Literal["kill", "kill oldest", "leave", "resize", "kill coordinator"]
WEIGHTS: dict[Kind, float] = {"kill": 6, "leave": 3, "resize": 6}
SCRIPT = ("examples/digits.py", "--epochs", "1000000", "--shards", "8")
BEGIN_S = 120.0
END_S = 120.0


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        minutes: with faults.
        pause_s: between two faults, on average.
        largest: number of workers.
        look_s: between two looks at memory, files and threads.
        rare_s: between two ends of the coordinator, and of the oldest worker. Both are left alone that long, so that
            it shows what grows in them.
        compare: whether the weights are compared with those of a serial run of as many steps.
        seed: of the faults.
    """

    minutes: float = 30.0
    pause_s: float = 3.0
    largest: int = 4
    look_s: float = 5.0
    rare_s: float = 240.0
    compare: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens.

    Attributes:
        at: seconds after the beginning.
        kind: what.
        number: of workers after a resize; decides else who it is.
    """

    at: float
    kind: Kind
    number: int


def faults(choice: Choice) -> Iterator[Fault]:
    """What happens, in order. The same for the same choice."""
    order = random.Random(choice.seed)  # noqa: S311  it is to be repeatable
    end, at, rare = 60 * choice.minutes, 0.0, choice.rare_s
    turns: list[Kind] = ["kill coordinator", "kill oldest"]
    while (at := at + order.uniform(0.3, 1.7) * choice.pause_s) < end:
        if at >= rare:
            yield Fault(at, turns[0], 0)
            turns, rare = turns[::-1], rare + choice.rare_s
        else:
            kind = order.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            yield Fault(at, kind, order.randint(1, choice.largest))


def inflict(job: Job, fault: Fault) -> str:
    """Let it happen; returns what was done, or nothing if there was nobody to do it to."""
    if fault.kind == "kill coordinator":
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(int(json.loads((job.folder / "coordinator.json").read_text())["pid"]), signal.SIGKILL)
            return fault.kind
        return ""
    members = job.status().get("members", [])
    # The first of the roster is the oldest: whoever joins comes last.
    chosen = members[:1] if fault.kind == "kill oldest" else members[1:]
    with suppress(ProcessLookupError, JobError, LaunchError):
        if fault.kind == "resize":
            job.control.resize(fault.number)
            return f"resize {fault.number}"
        if chosen and (fault.kind == "kill oldest" or len(members) > 1):
            victim = chosen[fault.number % len(chosen)]
            if fault.kind == "leave":
                job.control.leave(victim["id"])
            else:
                os.kill(victim["pid"], signal.SIGKILL)
            return f"{fault.kind} {victim['id']}"
    return ""


@dataclass(frozen=True, slots=True)
class Found:
    """What a soak leaves.

    Attributes:
        samples: in order.
        done: the faults that hit somebody, by kind.
        generations: that were formed.
        steps: that were committed.
        once: whether ``metrics.jsonl`` has each of them once.
        longest_s: the longest time without a new step.
        code: of the job's end.
        left: processes that outlived it.
        digest: of its weights; empty if it was not compared.
        serial: of the serial run's.
    """

    samples: list[Sample]
    done: dict[str, int]
    generations: int
    steps: int
    once: bool
    longest_s: float
    code: int
    left: list[str]
    digest: str = ""
    serial: str = ""

    @property
    def failures(self) -> list[str]:
        """What must not be."""
        wrong = {
            f"the job ended with {self.code}, not with 75": self.code != 75,
            f"processes are left: {', '.join(self.left)}": bool(self.left),
            "metrics.jsonl does not have each step once": not self.once,
            f"the weights {self.digest} are not those of the serial run, {self.serial}": self.digest != self.serial,
        }
        return [words for words, is_so in wrong.items() if is_so]


def run(choice: Choice) -> Report:
    """Let a job train among faults, stop it, and look at what it leaves."""
    meter = NoiseMeter()
    with TemporaryDirectory(prefix="benchmark-") as name:
        found = soak(choice, Path(name))
    meter.calibrate()
    return Report(
        name="soak",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[growth(found), summary(found)],
        figures={"found": asdict(found)},
        failures=found.failures,
    )


def soak(choice: Choice, folder: Path) -> Found:
    """The job, its faults and its end."""
    options = ["-n", f"1:{choice.largest}", "--max-restarts", "1000000", "--checkpoint-every", "200"]
    done: dict[str, int] = {}
    with running(options, SCRIPT, folder=folder / "run") as job:
        assert job.launcher is not None
        job.until((job.folder / "metrics.jsonl").exists, "training begins")
        samples, family = disturbed(choice, job, done)
        stop(job)
        code = job.launcher.wait(END_S)
    left = family.left()
    steps, once = counted(job)
    generations = len(job.journal("minted"))
    found = Found(samples, done, generations, steps, once, longest(job), code, left)
    if not choice.compare:
        return found
    digests = [digest(folder / where, steps) for where in ("run", "serial")]
    return replace(found, digest=digests[0], serial=digests[1])


def disturbed(choice: Choice, job: Job, done: dict[str, int]) -> tuple[list[Sample], Family]:
    """Fault after fault, with a look in between."""
    assert job.launcher is not None
    family, samples = Family(job.launcher.pid, job.folder), []
    begun, look = time.monotonic(), 0.0
    for fault in [*faults(choice), None]:
        until = 60 * choice.minutes if fault is None else fault.at
        while (now := time.monotonic() - begun) < until:
            if job.launcher.poll() is not None:
                raise RuntimeError(f"the job ended with {job.launcher.returncode}: {job.last_words}")
            if now >= look:
                samples.append(family.look(now))
                with (job.folder.parent / "samples.jsonl").open("a") as file:  # to be looked at meanwhile
                    file.write(json.dumps(asdict(samples[-1])) + "\n")
                look += choice.look_s
            time.sleep(min(LOOK_S * 5, max(0.0, until - now)))
        if fault is not None and inflict(job, fault):
            done[fault.kind] = done.get(fault.kind, 0) + 1
    return samples, family


def stop(job: Job) -> None:
    """Have it stop, whatever its coordinator is doing just now."""

    def is_asked() -> bool:
        with suppress(JobError, LaunchError):
            job.control.stop()
            return True
        return False

    job.until(is_asked, "the coordinator is asked to stop the job")


def digest(folder: Path, steps: int) -> str:
    """Of the weights after so many steps, in a folder that has them, or one in which everything begins."""
    with running(["-n", "1"], SCRIPT, {"UNISONO_STOP_AFTER": str(steps)}, folder) as job:
        assert job.launcher is not None
        job.launcher.wait()
    return str(json.loads((folder / "result.json").read_text())["weights_sha256"])


def counted(job: Job) -> tuple[int, bool]:
    """How many steps were committed, and whether there is a line for each."""
    steps = lines(job)
    return len(set(steps)), steps == list(range(len(steps)))


def lines(job: Job) -> list[int]:
    """The steps that ``metrics.jsonl`` has lines of."""
    found = map(json.loads, (job.folder / "metrics.jsonl").read_text().splitlines())
    return [int(line["step"]) for line in found if "loss" in line]


def longest(job: Job) -> float:
    """The longest pause between two generations' first steps and the steps before: nothing hangs."""
    found = map(json.loads, (job.folder / "metrics.jsonl").read_text().splitlines())
    return max((float(line["seconds"]["total"]) for line in found if "loss" in line), default=0.0)


def growth(found: Found) -> Grid:
    """What each kind of process used, and how much more with every hour."""
    rows = []
    for role in ("agent", "coordinator", "template", "oldest worker"):
        for what, unit in (("rss", "MB"), ("private", "MB"), ("files", ""), ("threads", "")):
            series = [
                (one.at, process.pid, float(getattr(process, what)))
                for one in found.samples
                for process in one.processes
                if process.role == role
            ]
            rows.append((role, what, *cells(series, unit)))
    whole = {
        "shared memory": ([one.shared for one in found.samples], "MB"),
        "its segments": ([float(one.segments) for one in found.samples], ""),
        "processes": ([float(len(one.processes)) for one in found.samples], ""),
    }
    for what, (values, unit) in whole.items():
        series = [(one.at, 0, value) for one, value in zip(found.samples, values, strict=True)]
        rows.append(("all together", what, *cells(series, unit)))
    return Grid(
        "what was used: median and largest, and its growth per hour (95 % interval)",
        ("", "", "median", "largest", "growth per hour"),
        rows,
        ("Growth within the life of a process, beyond its first 20 s. Shared: memory that several processes map.",),
    )


def cells(series: Sequence[tuple[float, int, float]], unit: str) -> tuple[str, str, str]:
    """For the table."""
    values = [value for _, _, value in series]
    if not values:
        return "-", "-", "-"
    slope = growth_per_hour(series)
    grown = "-" if slope is None else f"{slope:+.1f} {unit}".rstrip()
    return f"{statistics.median(values):.0f} {unit}".rstrip(), f"{max(values):.0f} {unit}".rstrip(), grown


def summary(found: Found) -> Grid:
    """What happened."""
    compared = "not compared" if not found.serial else "the serial run's" if found.digest == found.serial else "WRONG"
    happened: dict[str, Any] = {
        "faults": ", ".join(f"{kind} {count}" for kind, count in sorted(found.done.items())),
        "generations": found.generations,
        "steps": found.steps,
        "longest step": f"{found.longest_s:.1f} s",
        "processes left": len(found.left),
        "weights": compared,
    }
    rows = [(name, str(value)) for name, value in happened.items()]
    return Grid("what happened", ("", ""), rows, tuple(f"WRONG: {failure}" for failure in found.failures))
