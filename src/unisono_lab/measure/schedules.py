"""The schedules of a model in stages, each measured: how long a step takes, and how much of it devices are idle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from unisono.errors import JobError
from unisono.jsonl import read_lines
from unisono.launch.settings import LaunchSettings, Script
from unisono.settings.reading import settings_by_path
from unisono.train.model.stages import LOOPED, SCHEDULES
from unisono_lab.measure.engines import StudyEngine


def ideal_bubble(schedule: str, devices: int, shards: int, blocks: int) -> float:
    """The share of a step in which a device has nothing to do, if all stages are alike and messages take no time.

    With p devices, m shards and v blocks of stages on each device: (p - 1) / (v m + p - 1) for GPipe (Huang et al.,
    NeurIPS 2019), 1F1B and interleaved 1F1B (Narayanan et al., SC 2021) and looped BFS (Lamy-Poirier, MLSys 2023); and
    (p - 1) / (3 v m + p - 1) where gradients of weights fill the gaps (ZB-H1 of Qi et al., ICLR 2024), if a forward
    pass, and a backward pass for inputs or for weights, take equally long.

    Args:
        schedule: the name of the schedule.
        devices: the number of devices.
        shards: the number of shards of a worker.
        blocks: the number of blocks of stages.
    """
    rounds = blocks // devices if schedule in LOOPED else 1
    parts = 3 if schedule == "interleaved-zero-bubble" else 1
    return (devices - 1) / (parts * rounds * shards + devices - 1)


STEPS = 30
"""Of each run that count, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ScheduleStudy:
    """What is to be measured: one worker, whose devices hold the stages, by each schedule.

    Attributes:
        script: the script, which calls ``run.pipeline``.
        devices: the number of devices.
        repeats: the number of runs by each schedule.
        steps: the steps of a run that count.
        warmup: the steps before them.
        shards: the number of shards, unless the script sets it.
        threads: torch threads of each device, unless the script sets it.
        tuned: whether to have the allocator keep memory.
        seed: the seed of the order of the runs.
    """

    script: Script
    devices: int
    repeats: int = 5
    steps: int = STEPS
    warmup: int = 5
    shards: int | None = None
    threads: int | None = None
    tuned: bool = True
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            JobError: says what to change.
        """
        if self.devices < 2:
            raise JobError(
                f"--stages {self.devices}: the number of devices that hold the stages; at least 2 are needed"
            )
        if min(self.repeats, self.steps) < 1 or self.warmup < 0:
            raise JobError("--repeats and --steps need to be at least 1, and --warmup at least 0")
        self.settings(SCHEDULES[0]).check()

    def settings(self, schedule: str) -> LaunchSettings:
        """How to start a run by a schedule."""
        told = {
            "UNISONO_STUDY": "1",
            "UNISONO_STAGE_SCHEDULE": schedule,
            "UNISONO_STOP_AFTER": str(self.warmup + self.steps),
        }
        options = {
            "communication.devices_per_worker": self.devices,
            "shards": self.shards,
            "arithmetic.threads": self.threads,
            "launch.tuning": None if self.tuned else False,
        }
        return LaunchSettings.tuned(self.script, settings_by_path(options), workers=1, extra_environment=told)


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """What was measured of a schedule.

    Attributes:
        schedule: its name.
        step_s: the median of a step's seconds, of each run.
        idle: the share of a step's passes in which each device was idle, the median over all steps.
        ideal: see :func:`ideal_bubble`.
        trouble: why there are no figures; empty if there are some.
    """

    schedule: str
    step_s: Sequence[float] = ()
    idle: Sequence[float] = ()
    ideal: float = 0.0
    trouble: str = ""


def measure_schedules(
    study: ScheduleStudy, place: Path, tell: Callable[[str], None] = lambda words: None
) -> list[ScheduleFigures]:
    """Run a script by all schedules, one after the other in random order, as often as wanted.

    Args:
        study: what to measure.
        place: a folder for the runs' folders.
        tell: a function that is told of each run before it starts.

    Returns:
        the figures, the fastest first; what has none is last.

    Raises:
        JobError: the script has no stages on several devices.
    """
    order = random.Random(study.seed)  # noqa: S311  it is to be repeatable
    found: dict[str, list[_Run]] = {schedule: [] for schedule in SCHEDULES}
    trouble: dict[str, str] = {}
    for repeat in range(study.repeats):
        for schedule in order.sample(SCHEDULES, len(SCHEDULES)):
            if schedule in trouble:
                continue
            tell(f"{schedule}, run {repeat + 1} of {study.repeats}")
            folder = place / f"{schedule}-{repeat}"
            end = StudyEngine().run(study.settings(schedule), folder)
            if end.interrupted:
                raise KeyboardInterrupt
            if end.exit_code:
                trouble[schedule] = end.words
            else:
                found[schedule].append(_Run.of(folder, study.warmup))
    figures = [_figures(schedule, runs, trouble.get(schedule, "")) for schedule, runs in found.items()]
    return sorted(figures, key=lambda one: (bool(one.trouble), median(one.step_s) if one.step_s else 0.0))


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: the median of a step, and what each device says of its passes."""

    step_s: float
    passes: Sequence[Sequence[Mapping[str, Any]]]

    @classmethod
    def of(cls, folder: Path, warmup: int) -> _Run:
        lines = [line for line in read_lines(folder / "metrics.jsonl") if "seconds" in line][warmup:]
        passes = [read_lines(path)[warmup:] for path in sorted(folder.glob("stages-*.jsonl"))]
        if not lines or not any(passes):
            raise JobError(
                "the script has no steps of a model in stages that count: it calls run.pipeline before run.prepare, "
                "and trains for more steps than --warmup"
            )
        return cls(median(line["seconds"]["total"] for line in lines), passes)


def _figures(schedule: str, runs: Sequence[_Run], trouble: str) -> ScheduleFigures:
    if trouble:
        return ScheduleFigures(schedule, trouble=trouble)
    about = runs[0].passes[0][0]
    ideal = ideal_bubble(schedule, about["devices"], about["shards"], about["blocks"])
    return ScheduleFigures(schedule, [run.step_s for run in runs], list(_idle(runs)), ideal)


def _idle(runs: Sequence[_Run]) -> Iterator[float]:
    for device in range(len(runs[0].passes)):
        lines = [line for run in runs for line in run.passes[device]]
        yield median(1 - line["busy_s"] / line["passes_s"] for line in lines)


def table_of(figures: Sequence[ScheduleFigures]) -> list[tuple[str, ...]]:
    """The figures as rows of text, with a head."""
    rows: list[tuple[str, ...]] = [("schedule", "step", "beside the fastest", "idle, by device", "mean", "ideal")]
    fastest = next((median(one.step_s) for one in figures if one.step_s), 1.0)
    for one in figures:
        if one.trouble:
            rows.append((one.schedule, "-", "-", "-", "-", "-"))
            continue
        step_s = median(one.step_s)
        idle = " ".join(f"{each:.0%}" for each in one.idle)
        mean = f"{fmean(one.idle):.1%}"
        rows.append(
            (one.schedule, f"{1000 * step_s:.1f} ms", f"{step_s / fastest:.3f}", idle, mean, f"{one.ideal:.1%}")
        )
    return rows
