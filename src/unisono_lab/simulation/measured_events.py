"""What journals say of durations: of starts, of generations that form, of losses and of checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any, TypeGuard

import numpy as np

from unisono.adapt.layout_trials import Layout
from unisono.received import LONGEST_S
from unisono_lab.replay.record import Record

WARM_UP = 3
"""Steps of a generation in which memory is still made, and that are left out."""

APART = 2.0
"""So many times the workers of the smallest generation tell what all take apart from what each adds."""

SHORTEST_S = 1e-4
"""What is shorter is as short, beside errors that are relative."""

Sizes = Sequence[tuple[int, float]]
"""Generations: the number of workers, and seconds."""


class MeasuredEvents:
    """The durations of all journals that were read."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = defaultdict(list)
        self._formed: list[tuple[int, float]] = []  # without joiners
        self._joined: list[tuple[int, float]] = []  # with them

    def read(self, run: Record, medians: Mapping[Layout, float]) -> None:
        """Take what the journal of a run says.

        Args:
            run: the run.
            medians: seconds of its steps, by layout.
        """
        events = _Events(run, medians, self._found, self._formed, self._joined)
        for line in run.journal:
            events.note(line)

    def durations(self) -> dict[str, float]:
        """What all of them come to: medians, and for generations a line over the number of workers."""
        found = {name: median(values) for name, values in self._found.items() if values}
        if self._formed:
            found["form_s"], found["form_each_s"] = _line(self._formed)
        if self._joined:
            form_s, each_s = found.get("form_s", 0.0), found.get("form_each_s", 0.0)
            copies = [(workers, max(0.0, took - form_s - workers * each_s)) for workers, took in self._joined]
            found["copy_s"], found["copy_each_s"] = _line(copies)
        return found


def _line(sizes: Sizes) -> tuple[float, float]:
    """Seconds for all workers together, and for each: never negative, with the smallest relative errors.

    Each worker of a generation connects to all others. So all of it is each one's as long as the numbers of workers
    are too much alike to tell.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for workers, took in sizes:
        by_size[workers].append(took)
    if max(by_size) < APART * min(by_size):
        return 0.0, median(took / workers for workers, took in sizes)
    from scipy.optimize import nnls  # takes a moment to load

    typical = {workers: max(median(found), SHORTEST_S) for workers, found in by_size.items()}
    rows = [(1 / took, workers / took) for workers, took in typical.items()]
    (all_s, each_s), _ = nnls(np.array(rows), np.ones(len(rows)))
    return float(all_s), float(each_s)


class _Events:
    """What the events of one run say of durations.

    Args:
        run: the run.
        medians: seconds of a step, by layout.
        found: the durations noted so far, by name.
        formed: generations without joiners, each with the seconds that it took to form.
        joined: the same of those with joiners.
    """

    def __init__(
        self,
        run: Record,
        medians: Mapping[Layout, float],
        found: dict[str, list[float]],
        formed: list[tuple[int, float]],
        joined: list[tuple[int, float]],
    ) -> None:
        self._run, self._medians, self._found = run, medians, found
        self._formed, self._joined = formed, joined
        self._asked: dict[str, tuple[str, int]] = {}  # by worker: the figure, and the number of the order
        self._orders = 0
        self._ready: dict[int, list[float]] = {}  # by order: seconds until each was ready
        self._cold: set[str] = set()  # hosts that have not started a worker yet
        self._lost_at: float | None = None
        self._minted: tuple[float, int, bool] | None = None  # when members had ended, their number, whether some join
        self._by_number = {line["step"]: line for line in run.steps if is_count(line["step"])}
        self._ends = [(line["time"], line) for line in run.steps if _is_moment(line.get("time"))]

    def note(self, line: Mapping[str, Any]) -> None:
        """One event more."""
        at, took = _moment(line), line.get("seconds")
        host = str(line.get("host"))
        match line.get("event"):
            case "agent joined":
                self._cold.add(host)
            case "asked for":
                figure = "start_s" if host in self._cold or not self._orders else "later_start_s"
                self._cold.discard(host)
                self._orders += 1
                self._asked |= dict.fromkeys(_names(line.get("workers")), (figure, self._orders))
            case "lost" if at is not None:
                self._lost_at = at if self._lost_at is None else self._lost_at
            case "minted" if at is not None:
                self._note_minted(line, at)
            case "formed" if at is not None and self._minted is not None:
                self._note_formed(line.get("generation"), at, *self._minted)
            case "checkpoint" if is_duration(took):
                self._note_duration("checkpoint_s", float(took))
                self._note_stall(line.get("step"))

    def _note_minted(self, line: Mapping[str, Any], at: float) -> None:
        joined, workers, ready = _names(line.get("joined")), _names(line.get("workers")), line.get("ready")
        if isinstance(ready, list) and len(ready) == len(joined):
            self._note_ready({name: took for name, took in zip(joined, ready, strict=True) if is_duration(took)})
        lost = _names(line.get("lost"))
        if lost and self._lost_at is not None:
            noticed_at = max(self._lost_at, self._step_end(self._lost_at))
            self._note_duration("detect_s", max(0.0, at - noticed_at))
        self._lost_at = None
        ended_at = at if lost or len(joined) == len(workers) else self._last_step(at)[0]
        self._minted = ended_at or at, len(workers), 0 < len(joined) < len(workers)

    def _note_ready(self, ready: Mapping[str, float]) -> None:
        """The first of an order says how long a start takes, and the others how far apart they come."""
        orders: dict[tuple[str, int], list[float]] = defaultdict(list)
        for name, took in ready.items():
            if (asked := self._asked.pop(name, None)) is not None:
                orders[asked].append(took)
        for (figure, number), came in orders.items():
            before = self._ready.get(number, [])
            if not before:
                self._note_duration(figure, min(came))
            for one, other in pairwise(sorted([*before[-1:], *came])):
                self._note_duration("start_each_s", other - one)
            self._ready[number] = sorted([*before, *came])

    def _last_step(self, at: float) -> tuple[float, Mapping[str, Any]]:
        """The newest step that had ended by then, with the moment; 0 and nothing if there is none."""
        return next(((ended, line) for ended, line in reversed(self._ends) if ended <= at), (0.0, {}))

    def _step_end(self, lost_at: float) -> float:
        """When the step that a loss broke off would have ended; 0 if that is not known."""
        ended, last = self._last_step(lost_at)
        layout = layout_of(self._run, last)
        return 0.0 if layout is None else ended + self._medians.get(layout, 0.0)

    def _note_formed(self, generation: Any, at: float, ended_at: float, workers: int, joined: bool) -> None:
        self._minted = None
        took = at - ended_at + self._first_steps(generation, at)
        if at >= ended_at and is_duration(took) and workers:
            (self._joined if joined else self._formed).append((workers, took))

    def _first_steps(self, generation: Any, formed_at: float) -> float:
        """What the first steps of a generation took longer than later ones."""
        first = [line for line in self._run.steps if line.get("generation") == generation][:WARM_UP]
        layout = layout_of(self._run, first[-1]) if first else None
        ended = first[-1].get("time") if first else None
        if layout is None or layout not in self._medians or not _is_moment(ended):
            return 0.0
        return max(0.0, ended - formed_at - len(first) * self._medians[layout])

    def _note_stall(self, step: Any) -> None:
        """Beside the median, what the step took in which a checkpoint was written."""
        line = self._by_number.get(step) if is_count(step) else None
        layout = None if line is None else layout_of(self._run, line)
        if line is not None and layout is not None and layout in self._medians:
            self._note_duration("stall_s", max(0.0, line["seconds"]["total"] - self._medians[layout]))

    def _note_duration(self, name: str, seconds: float) -> None:
        if is_duration(seconds):  # no clock was put back
            self._found[name].append(seconds)


def layout_of(run: Record, line: Mapping[str, Any]) -> Layout | None:
    """The layout of a step; None if the line makes no sense."""
    took, workers, batch = line.get("seconds"), line.get("world_size"), line.get("batch_size")
    total = took.get("total") if isinstance(took, Mapping) else None
    if not is_count(workers) or not is_count(batch) or not isinstance(total, float) or not 0 < total < LONGEST_S:
        return None
    if workers > run.job.shards:  # a job never has so many
        return None
    return Layout(workers, batch, run.job.shards)


def is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a number of something."""
    return type(value) is int and 0 < value < 2**53


def is_duration(value: Any) -> TypeGuard[float]:
    """Whether it is a number of seconds; two of them may be added up."""
    return type(value) in (int, float) and 0 <= value < LONGEST_S / 2


def _names(found: Any) -> list[str]:
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _is_moment(value: Any) -> TypeGuard[float]:
    """Whether it is a time in seconds since 1970, which are more than any duration."""
    return type(value) in (int, float) and 0 <= value < 2**40


def _moment(line: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(line.get("time"))).timestamp()
    except (ValueError, OverflowError):
        return None
