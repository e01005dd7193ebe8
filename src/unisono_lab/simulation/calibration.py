"""The figures of a simulation from studies and runs: from their steps, and from the events in their journals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

import numpy as np

from unisono.adapt.layouts import Layout, StepTime, fit
from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono.received import LONGEST_S
from unisono_lab.journal_events import moment_of
from unisono_lab.recorded.record import Record
from unisono_lab.simulation.scenario import MeasuredFigures

NORMAL = 1.4826
"""The standard deviation of a normal distribution as a multiple of its median absolute deviation."""

MOST_BYTES_PER_S = 1e15
"""A bandwidth above that of any network."""

GROWING = 0.5
"""The assumed share of a reduction that grows with the workers, if only one number of workers was measured."""


WARM_UP = 3
"""The number of first steps of a generation, which still allocate memory, and are left out."""

APART = 2.0
"""The ratio of the largest to the smallest generation from which a constant can be told from a time per worker."""

SHORTEST_S = 1e-4
"""Shorter durations count as this one, since the errors of the fit are relative."""


def measured(folders: Sequence[Path]) -> MeasuredFigures:
    """The figures in run folders, and in the run folders of studies.

    The time of a step is fitted to the medians of its layouts; its jitter is the deviation of single steps from these.

    Raises:
        JobError: a folder is neither, or none of them has steps.
    """
    cells = [(folder, sorted(folder.glob("cells/*/run/job.json"))) for folder in folders]
    runs = [Record.read(run) for folder, jobs in cells for run in ([job.parent for job in jobs] or [folder])]
    by_layout: dict[Layout, list[float]] = defaultdict(list)
    computed: dict[Layout, list[float]] = defaultdict(list)
    journals = []
    for run in runs:
        own: dict[Layout, list[float]] = defaultdict(list)
        for layout, times in _steps(run):
            own[layout].append(times["total"])
            if _is_duration(part := times.get("compute")) and part:
                computed[layout].append(float(part))
        journals.append(_Journal(run, _medians(own)))
        for layout, seconds in own.items():
            by_layout[layout] += seconds
    if folders and not by_layout:
        raise JobError(f"{', '.join(map(str, folders))}: no step after the first {WARM_UP} is recorded there")
    medians, durations = _medians(by_layout), _durations(journals)
    if (jitter := _jitter(by_layout, medians)) is not None:
        durations["jitter"] = jitter
    link, damaged = _link(runs), [words for run in runs for words in run.damaged]
    if not medians:
        return MeasuredFigures(seconds=durations, link=link, damaged=damaged)
    step, guessed = _with_guesses(fit(medians, _medians(computed)), medians)
    return MeasuredFigures(step, durations, max(layout.workers for layout in medians), guessed, link, damaged)


def _medians(values: Mapping[Layout, Sequence[float]]) -> dict[Layout, float]:
    return {layout: median(seconds) for layout, seconds in values.items()}


def _with_guesses(step: StepTime, seen: Collection[Layout]) -> tuple[StepTime, frozenset[str]]:
    """The step time with guesses for the figures that the measured layouts do not determine, and the names of these.

    A reduction sends bytes, of which each worker's share does not depend on the number of workers, and messages, of
    which a worker has one more for each further worker. A single number of workers cannot tell the two apart: half of
    the time is assumed to grow with the workers.
    """
    workers = {layout.workers for layout in seen if layout.workers > 1}
    guessed = {"b_c"} if len({layout.shard_size for layout in seen}) == 1 else set()
    if not workers:
        return step, frozenset({*guessed, "a_r", "b_r", "gamma"})
    if len(workers) > 1:
        return step, frozenset(guessed)
    (measured_workers,) = workers
    reduction_s = step.a_r + step.b_r * (measured_workers - 2)
    each_s = reduction_s * GROWING / measured_workers
    return replace(step, a_r=reduction_s - each_s * (measured_workers - 2), b_r=each_s), frozenset({*guessed, "b_r"})


def _link(runs: Sequence[Record]) -> dict[str, float]:
    """The network figures of studies, medians over the runs with the most workers, which delay each other most."""
    links: dict[int, list[dict[str, float]]] = defaultdict(list)
    for run in runs:
        result = RunFolder(run.path).read_result() or {}
        reduction, workers, size = result.get("reduction"), result.get("world_size"), result.get("gradient_bytes")
        if not isinstance(reduction, Mapping) or not _is_count(workers) or not _is_count(size):
            continue
        latency_s, bytes_per_s = reduction.get("latency_s"), reduction.get("bandwidth_bytes_per_s")
        if _is_duration(latency_s) and isinstance(bytes_per_s, float) and 0 < bytes_per_s < MOST_BYTES_PER_S:
            sent = size / 2 if run.job.compression == "bf16" else size
            links[workers].append({"latency_s": latency_s, "bytes_per_s": bytes_per_s, "gradient_bytes": float(sent)})
    if not links:
        return {}
    chosen = links[max(links)]
    return {name: median(link[name] for link in chosen) for name in chosen[0]}


def _steps(run: Record) -> Iterable[tuple[Layout, Mapping[str, Any]]]:
    """The layout and the times of each step, without the first steps of each generation."""
    counts: dict[int, int] = defaultdict(int)
    for line in run.steps:
        generation = line.get("generation", 0)
        if type(generation) is not int:
            continue
        counts[generation] += 1
        if counts[generation] > WARM_UP and (layout := _layout_of(run, line)) is not None:
            yield layout, line["seconds"]


def _jitter(by_layout: Mapping[Layout, Sequence[float]], medians: Mapping[Layout, float]) -> float | None:
    """The deviation of single steps from the median of their layout: a robust standard deviation of logarithms.

    A step of W workers takes as long as the slowest one, which varies less than a single worker; so the layout with the
    fewest workers is used.
    """
    sampled = {layout: steps for layout, steps in by_layout.items() if len(steps) >= 10}
    if not sampled:
        return None
    fewest = min(sampled, key=lambda layout: layout.workers)
    return min(2.0, NORMAL * median(abs(math.log(seconds / medians[fewest])) for seconds in sampled[fewest]))


def _durations(journals: Sequence[_Journal]) -> dict[str, float]:
    """The durations of all journals: medians, and for forming generations a line over the number of workers."""
    names = {name: None for journal in journals for name in journal.durations}
    durations = {name: median(chain.from_iterable(journal.durations[name] for journal in journals)) for name in names}
    formed, joined = (
        [generation for journal in journals for generation in journal.formed[joins]] for joins in (False, True)
    )
    if formed:
        durations["form_s"], durations["form_each_s"] = _line(formed)
    if joined:
        form_s, each_s = durations.get("form_s", 0.0), durations.get("form_each_s", 0.0)
        copies = [(workers, max(0.0, seconds - form_s - workers * each_s)) for workers, seconds in joined]
        durations["copy_s"], durations["copy_each_s"] = _line(copies)
    return durations


def _line(sizes: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit a constant and seconds per worker: neither is negative, and the relative errors are the smallest.

    If the numbers of workers are too similar for two figures, the constant is 0, since each worker of a generation
    connects to all others.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for workers, seconds in sizes:
        by_size[workers].append(seconds)
    if max(by_size) < APART * min(by_size):
        return 0.0, median(seconds / workers for workers, seconds in sizes)
    from scipy.optimize import nnls  # takes a moment to load

    typical = {workers: max(median(durations), SHORTEST_S) for workers, durations in by_size.items()}
    rows = [(1 / seconds, workers / seconds) for workers, seconds in typical.items()]
    (all_s, each_s), _ = nnls(np.array(rows), np.ones(len(rows)))
    return float(all_s), float(each_s)


class _Journal:
    """The durations in the journal of one run.

    Attributes:
        formed: the number of workers of each generation, and the seconds that it took to form; by whether some of
            them were joiners.
    """

    def __init__(self, run: Record, medians: Mapping[Layout, float]) -> None:
        self.durations: dict[str, list[float]] = defaultdict(list)
        self.formed: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        self._run, self._medians = run, medians
        self._orders_by_worker: dict[str, tuple[str, int]] = {}  # the name of a duration, and the order
        self._orders = 0
        self._ready: dict[int, list[float]] = {}  # by order: the seconds until each worker was ready
        self._cold: set[str] = set()  # hosts that have not yet started a worker
        self._lost_at: float | None = None
        # The end of the generation before, the number of workers, and whether some of them join.
        self._minted: tuple[float, int, bool] | None = None
        self._by_number = {line["step"]: line for line in run.steps if _is_count(line["step"])}
        self._ends = [(line["time"], line) for line in run.steps if _is_moment(line.get("time"))]
        for line in run.journal:
            self._note(line)

    def _note(self, line: Mapping[str, Any]) -> None:
        moment, seconds = moment_of(line), line.get("seconds")
        host = str(line.get("host"))
        match line.get("event"):
            case "agent joined":
                self._cold.add(host)
            case "asked for":
                figure = "start_s" if host in self._cold or not self._orders else "later_start_s"
                self._cold.discard(host)
                self._orders += 1
                self._orders_by_worker |= dict.fromkeys(_names(line.get("workers")), (figure, self._orders))
            case "lost" if moment is not None:
                self._lost_at = moment if self._lost_at is None else self._lost_at
            case "minted" if moment is not None:
                self._note_minted(line, moment)
            case "formed" if moment is not None and self._minted is not None:
                self._note_formed(line.get("generation"), moment, *self._minted)
            case "checkpoint" if _is_duration(seconds):
                self._note_duration("checkpoint_s", float(seconds))
                self._note_stall(line.get("step"))

    def _note_minted(self, line: Mapping[str, Any], at: float) -> None:
        joined, workers, ready = _names(line.get("joined")), _names(line.get("workers")), line.get("ready")
        if isinstance(ready, list) and len(ready) == len(joined):
            self._note_ready(
                {name: seconds for name, seconds in zip(joined, ready, strict=True) if _is_duration(seconds)}
            )
        lost = _names(line.get("lost"))
        if lost and self._lost_at is not None:
            noticed_at = max(self._lost_at, self._step_end(self._lost_at))
            self._note_duration("detect_s", max(0.0, at - noticed_at))
        self._lost_at = None
        ended_at = at if lost or len(joined) == len(workers) else self._last_step(at)[0]
        self._minted = ended_at or at, len(workers), 0 < len(joined) < len(workers)

    def _note_ready(self, ready: Mapping[str, float]) -> None:
        """Note an order: its first worker gives the time of a start, the others the time between workers."""
        orders: dict[tuple[str, int], list[float]] = defaultdict(list)
        for name, seconds in ready.items():
            if (order := self._orders_by_worker.pop(name, None)) is not None:
                orders[order].append(seconds)
        for (figure, number), times in orders.items():
            earlier_times = self._ready.get(number, [])
            if not earlier_times:
                self._note_duration(figure, min(times))
            for earlier, later in pairwise(sorted([*earlier_times[-1:], *times])):
                self._note_duration("start_each_s", later - earlier)
            self._ready[number] = sorted([*earlier_times, *times])

    def _last_step(self, at: float) -> tuple[float, Mapping[str, Any]]:
        """The end and the line of the newest step that had ended at a moment; 0 and an empty line if there is none."""
        return next(((ended, line) for ended, line in reversed(self._ends) if ended <= at), (0.0, {}))

    def _step_end(self, lost_at: float) -> float:
        """The moment at which the step that a loss broke off would have ended; 0 if it is not known."""
        ended, last = self._last_step(lost_at)
        layout = _layout_of(self._run, last)
        return 0.0 if layout is None else ended + self._medians.get(layout, 0.0)

    def _note_formed(self, generation: Any, at: float, ended_at: float, workers: int, joined: bool) -> None:
        self._minted = None
        seconds = at - ended_at + self._first_steps(generation, at)
        if at >= ended_at and _is_duration(seconds) and workers:
            self.formed[joined].append((workers, seconds))

    def _first_steps(self, generation: Any, formed_at: float) -> float:
        """The additional seconds that the first steps of a generation took."""
        first = [line for line in self._run.steps if line.get("generation") == generation][:WARM_UP]
        layout = _layout_of(self._run, first[-1]) if first else None
        ended = first[-1].get("time") if first else None
        if layout is None or layout not in self._medians or not _is_moment(ended):
            return 0.0
        return max(0.0, ended - formed_at - len(first) * self._medians[layout])

    def _note_stall(self, step: Any) -> None:
        """Note the additional seconds of a step in which a checkpoint was written."""
        line = self._by_number.get(step) if _is_count(step) else None
        layout = None if line is None else _layout_of(self._run, line)
        if line is not None and layout is not None and layout in self._medians:
            self._note_duration("stall_s", max(0.0, line["seconds"]["total"] - self._medians[layout]))

    def _note_duration(self, name: str, seconds: float) -> None:
        if _is_duration(seconds):  # it may be negative if a clock was put back
            self.durations[name].append(seconds)


def _layout_of(run: Record, line: Mapping[str, Any]) -> Layout | None:
    """The layout of a step; None if the line makes no sense."""
    times, workers, batch = line.get("seconds"), line.get("world_size"), line.get("batch_size")
    total = times.get("total") if isinstance(times, Mapping) else None
    if not _is_count(workers) or not _is_count(batch) or not isinstance(total, float) or not 0 < total < LONGEST_S:
        return None
    if workers > run.job.shards:  # no job has more workers than shards
        return None
    return Layout(workers, batch, run.job.shards)


def _is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a positive integer."""
    return type(value) is int and 0 < value < 2**53


def _is_duration(value: Any) -> TypeGuard[float]:
    """Whether a value is a number of seconds; the sum of two is one, too."""
    return type(value) in (int, float) and 0 <= value < LONGEST_S / 2


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _is_moment(value: Any) -> TypeGuard[float]:
    """Whether a value is a time in seconds since 1970, which may be larger than any duration."""
    return type(value) in (int, float) and 0 <= value < 2**40
