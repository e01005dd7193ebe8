"""What studies and runs say of the figures of a simulation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from unisono.adapt.layout_trials import Layout
from unisono.adapt.step_time import fit
from unisono.errors import JobError
from unisono.received import LONGEST_S
from unisono.study.replay.record import Record
from unisono.study.simulation.scenario import MeasuredFigures

WARM_UP = 3
"""Steps of a generation in which memory is still made, and that are left out."""

NORMAL = 1.4826
"""Of a normal distribution, the standard deviation as a multiple of the median absolute deviation."""


def measured(folders: Sequence[Path]) -> MeasuredFigures:
    """What run folders, and the run folders of studies, say.

    The time of a step is fitted to the medians of its layouts; its jitter is how far single steps are from these.

    Args:
        folders: folders of runs or of studies.

    Raises:
        JobError: one is neither, or there are no steps in any.
    """
    runs = [Record.read(folder) for given in folders for folder in _run_folders(given)]
    by_layout: dict[Layout, list[float]] = defaultdict(list)
    for run in runs:
        for layout, seconds in _steps(run):
            by_layout[layout].append(seconds)
    if folders and not by_layout:
        raise JobError(f"{', '.join(map(str, folders))}: no step behind the first {WARM_UP} is recorded there")
    medians = {layout: median(found) for layout, found in by_layout.items()}
    durations = _durations(runs)
    if (jitter := _jitter(by_layout, medians)) is not None:
        durations["jitter"] = jitter
    return MeasuredFigures(
        step=fit(medians) if medians else None,
        seconds=durations,
        measured_to=max((layout.workers for layout in medians), default=0),
    )


def _run_folders(given: Path) -> list[Path]:
    """The folder itself, or those of a study's measurements."""
    cells = sorted(path.parent for path in given.glob("cells/*/run/job.json"))
    return cells or [given]


def _steps(run: Record) -> Iterable[tuple[Layout, float]]:
    """The seconds of each step, with its layout, behind the first ones of each generation."""
    seen: dict[Any, int] = defaultdict(int)
    for line in run.steps:
        took = line.get("seconds")
        total = took.get("total") if isinstance(took, Mapping) else None
        generation, workers, batch = line.get("generation", 0), line.get("world_size"), line.get("batch_size")
        seen[generation] += 1
        if seen[generation] <= WARM_UP or not _is_count(workers) or not _is_count(batch):
            continue
        if isinstance(total, float) and 0 < total < LONGEST_S:
            yield Layout(workers, batch, run.job.shards), total


def _jitter(by_layout: Mapping[Layout, Sequence[float]], medians: Mapping[Layout, float]) -> float | None:
    """How far single steps are from the median of their layout: robustly, in logarithms.

    The step of W workers is the slowest one's, which varies less than one worker does; so it is taken of the fewest.
    """
    several = {layout: found for layout, found in by_layout.items() if len(found) >= 10}
    if not several:
        return None
    fewest = min(several, key=lambda layout: layout.workers)
    return min(2.0, NORMAL * median(abs(math.log(each / medians[fewest])) for each in several[fewest]))


def _durations(runs: Sequence[Record]) -> dict[str, float]:
    """Medians over all events of the journals."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        asked: dict[str, float] = {}
        for line in run.journal:
            _note(line, asked, found)
    return {name: median(values) for name, values in found.items() if values}


def _note(line: Mapping[str, Any], asked: dict[str, float], found: dict[str, list[float]]) -> None:
    at, took = _moment(line), line.get("seconds")
    match line.get("event"):
        case "asked for" if at is not None:
            asked |= dict.fromkeys(_names(line.get("workers")), at)
        case "minted" if at is not None:
            waited = [at - asked.pop(name) for name in _names(line.get("joined")) if name in asked]
            found["start_s"] += [max(waited)] if waited and _is_duration(max(waited)) else []  # no clock was put back
        case "formed" if isinstance(took, Mapping):
            parts = {name: float(value) for name, value in took.items() if _is_duration(value)}
            found["form_s"] += [parts.get("regroup", 0.0) + parts.get("form", 0.0)]
            found["copy_s"] += [parts["copy"]] if parts.get("copy") else []
            found["detect_s"] += [parts["detect"]] if parts.get("detect") else []
        case "checkpoint" if _is_duration(took):
            found["checkpoint_s"] += [float(took)]


def _names(found: Any) -> list[str]:
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 2**53


def _is_duration(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 <= value < LONGEST_S / 2  # two of them are added up


def _moment(line: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(line.get("time"))).timestamp()
    except (ValueError, OverflowError):
        return None
