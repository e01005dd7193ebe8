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
    computed: dict[Layout, list[float]] = defaultdict(list)
    for run in runs:
        for layout, took in _steps(run):
            by_layout[layout].append(took["total"])
            if _is_duration(part := took.get("compute")) and part:
                computed[layout].append(float(part))
    if folders and not by_layout:
        raise JobError(f"{', '.join(map(str, folders))}: no step behind the first {WARM_UP} is recorded there")
    medians = {layout: median(found) for layout, found in by_layout.items()}
    durations = _durations(runs, medians)
    if (jitter := _jitter(by_layout, medians)) is not None:
        durations["jitter"] = jitter
    return MeasuredFigures(
        step=fit(medians, {layout: median(found) for layout, found in computed.items()}) if medians else None,
        seconds=durations,
        measured_to=max((layout.workers for layout in medians), default=0),
    )


def _run_folders(given: Path) -> list[Path]:
    """The folder itself, or those of a study's measurements."""
    cells = sorted(path.parent for path in given.glob("cells/*/run/job.json"))
    return cells or [given]


def _steps(run: Record) -> Iterable[tuple[Layout, Mapping[str, Any]]]:
    """What each step took, with its layout, behind the first ones of each generation."""
    seen: dict[Any, int] = defaultdict(int)
    for line in run.steps:
        generation = line.get("generation", 0)
        seen[generation] += 1
        if seen[generation] > WARM_UP and (layout := _layout(run, line)) is not None:
            yield layout, line["seconds"]


def _layout(run: Record, line: Mapping[str, Any]) -> Layout | None:
    """The layout of a step; None if the line makes no sense."""
    took, workers, batch = line.get("seconds"), line.get("world_size"), line.get("batch_size")
    total = took.get("total") if isinstance(took, Mapping) else None
    if not _is_count(workers) or not _is_count(batch) or not isinstance(total, float) or not 0 < total < LONGEST_S:
        return None
    return Layout(workers, batch, run.job.shards)


def _jitter(by_layout: Mapping[Layout, Sequence[float]], medians: Mapping[Layout, float]) -> float | None:
    """How far single steps are from the median of their layout: robustly, in logarithms.

    The step of W workers is the slowest one's, which varies less than one worker does; so it is taken of the fewest.
    """
    several = {layout: found for layout, found in by_layout.items() if len(found) >= 10}
    if not several:
        return None
    fewest = min(several, key=lambda layout: layout.workers)
    return min(2.0, NORMAL * median(abs(math.log(each / medians[fewest])) for each in several[fewest]))


def _durations(runs: Sequence[Record], medians: Mapping[Layout, float]) -> dict[str, float]:
    """Medians over all events of the journals."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        events = _Events(run, medians, found)
        for line in run.journal:
            events.note(line)
    return {name: median(values) for name, values in found.items() if values}


class _Events:
    """What the events of one run say of durations.

    Args:
        run: the run.
        medians: seconds of a step, by layout.
        found: the durations noted so far, by name.
    """

    def __init__(self, run: Record, medians: Mapping[Layout, float], found: dict[str, list[float]]) -> None:
        self._run, self._medians, self._found = run, medians, found
        self._asked: dict[str, tuple[str, float]] = {}  # by worker: the figure, and the moment
        self._cold: set[str] = set()  # hosts that have not started a worker yet
        self._lost_at: float | None = None
        self._minted_at: float | None = None
        self._by_number = {line["step"]: line for line in run.steps if _is_count(line["step"])}

    def note(self, line: Mapping[str, Any]) -> None:
        """One event more."""
        at, took = _moment(line), line.get("seconds")
        host = str(line.get("host"))
        match line.get("event"):
            case "agent joined":
                self._cold.add(host)
            case "asked for" if at is not None:
                figure = "start_s" if host in self._cold or not self._asked else "later_start_s"
                self._cold.discard(host)
                self._asked |= dict.fromkeys(_names(line.get("workers")), (figure, at))
            case "lost" if at is not None:
                self._lost_at = at if self._lost_at is None else self._lost_at
            case "minted" if at is not None:
                self._note_minted(line, at)
            case "formed" if isinstance(took, Mapping):
                self._note_formed(line, at, took)
            case "checkpoint" if _is_duration(took):
                self._note_duration("checkpoint_s", float(took))
                self._note_stall(line.get("step"))

    def _note_minted(self, line: Mapping[str, Any], at: float) -> None:
        took = line.get("seconds")
        ready_at = at - (took if _is_duration(took) else 0.0)  # behind that, members ended their step
        for figure in ("start_s", "later_start_s"):
            known = [self._asked[name] for name in _names(line.get("joined")) if name in self._asked]
            waited = [ready_at - asked_at for of, asked_at in known if of == figure]
            if waited:
                self._note_duration(figure, max(waited))
        if self._lost_at is not None and _names(line.get("lost")):
            self._note_duration("detect_s", at - self._lost_at)
        self._lost_at, self._minted_at = None, at

    def _note_formed(self, line: Mapping[str, Any], at: float | None, took: Mapping[str, Any]) -> None:
        copied = took.get("copy")
        copy_s = float(copied) if _is_duration(copied) else 0.0
        if copy_s:
            self._note_duration("copy_s", copy_s)
        if at is not None and self._minted_at is not None and at >= self._minted_at:
            formed_s = max(0.0, at - self._minted_at - copy_s)
            self._note_duration("form_s", formed_s + self._first_steps(line.get("generation"), at))

    def _first_steps(self, generation: Any, formed_at: float) -> float:
        """What the first steps of a generation took longer than later ones."""
        first = [line for line in self._run.steps if line.get("generation") == generation][:WARM_UP]
        layout = _layout(self._run, first[-1]) if first else None
        ended = first[-1].get("time") if first else None
        if layout is None or layout not in self._medians or not _is_duration(ended):
            return 0.0
        return max(0.0, ended - formed_at - len(first) * self._medians[layout])

    def _note_stall(self, step: Any) -> None:
        """Beside the median, what the step took in which a checkpoint was written."""
        line = self._by_number.get(step) if _is_count(step) else None
        layout = None if line is None else _layout(self._run, line)
        if line is not None and layout is not None and layout in self._medians:
            self._note_duration("stall_s", max(0.0, line["seconds"]["total"] - self._medians[layout]))

    def _note_duration(self, name: str, seconds: float) -> None:
        if _is_duration(seconds):  # no clock was put back
            self._found[name].append(seconds)


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
