"""What studies and runs say of the figures of a simulation: their steps, and the events in their journals."""

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

from unisono.adapt.layout_trials import Layout
from unisono.adapt.step_time import StepTime, fit
from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono.received import LONGEST_S
from unisono_lab.events import moment_of
from unisono_lab.replay.record import Record
from unisono_lab.simulation.scenario import MeasuredFigures

NORMAL = 1.4826
"""Of a normal distribution, the standard deviation as a multiple of the median absolute deviation."""

MOST_BYTES_PER_S = 1e15
"""More than any network carries."""

GROWING = 0.5
"""The share of a reduction that is taken to grow with the number of workers, if a single number was measured."""


WARM_UP = 3
"""Steps of a generation in which memory is still made, and that are left out."""

APART = 2.0
"""So many times the workers of the smallest generation tell what all take apart from what each adds."""

SHORTEST_S = 1e-4
"""What is shorter is as short, beside errors that are relative."""


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
    journals = []
    for run in runs:
        own: dict[Layout, list[float]] = defaultdict(list)
        for layout, took in _steps(run):
            own[layout].append(took["total"])
            if _is_duration(part := took.get("compute")) and part:
                computed[layout].append(float(part))
        journals.append(_Journal(run, _medians(own)))
        for layout, seconds in own.items():
            by_layout[layout] += seconds
    if folders and not by_layout:
        raise JobError(f"{', '.join(map(str, folders))}: no step behind the first {WARM_UP} is recorded there")
    medians, durations = _medians(by_layout), _durations(journals)
    if (jitter := _jitter(by_layout, medians)) is not None:
        durations["jitter"] = jitter
    link, damaged = _link(runs), [words for run in runs for words in run.damaged]
    if not medians:
        return MeasuredFigures(seconds=durations, link=link, damaged=damaged)
    step, guessed = _with_guesses(fit(medians, _medians(computed)), medians)
    return MeasuredFigures(step, durations, max(layout.workers for layout in medians), guessed, link, damaged)


def _medians(values: Mapping[Layout, Sequence[float]]) -> dict[Layout, float]:
    return {layout: median(found) for layout, found in values.items()}


def _with_guesses(step: StepTime, seen: Collection[Layout]) -> tuple[StepTime, frozenset[str]]:
    """What the layouts that were measured do not tell of a step, guessed; and the names of it.

    A reduction sends bytes, of which each worker has the same share however many there are, and messages, of which it
    has one more for each further worker. With a single number of workers nobody knows what it waits for: half of it is
    taken to grow with the workers.
    """
    workers = {layout.workers for layout in seen if layout.workers > 1}
    guessed = {"b_c"} if len({layout.shard_size for layout in seen}) == 1 else set()
    if not workers:
        return step, frozenset({*guessed, "a_r", "b_r", "gamma"})
    if len(workers) > 1:
        return step, frozenset(guessed)
    (known,) = workers
    reduction_s = step.a_r + step.b_r * (known - 2)
    each_s = reduction_s * GROWING / known
    return replace(step, a_r=reduction_s - each_s * (known - 2), b_r=each_s), frozenset({*guessed, "b_r"})


def _link(runs: Sequence[Record]) -> dict[str, float]:
    """What runs of studies have measured of the network: those of the most workers, which hold each other up most."""
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    for run in runs:
        result = RunFolder(run.path).read_result() or {}
        reduction, workers, size = result.get("reduction"), result.get("world_size"), result.get("gradient_bytes")
        if not isinstance(reduction, Mapping) or not _is_count(workers) or not _is_count(size):
            continue
        latency_s, bytes_per_s = reduction.get("latency_s"), reduction.get("bandwidth_bytes_per_s")
        if _is_duration(latency_s) and isinstance(bytes_per_s, float) and 0 < bytes_per_s < MOST_BYTES_PER_S:
            sent = size / 2 if run.job.compression == "bf16" else size
            found[workers].append({"latency_s": latency_s, "bytes_per_s": bytes_per_s, "gradient_bytes": float(sent)})
    if not found:
        return {}
    most = found[max(found)]
    return {name: median(each[name] for each in most) for name in most[0]}


def _run_folders(given: Path) -> list[Path]:
    """The folder itself, or those of a study's measurements."""
    cells = sorted(path.parent for path in given.glob("cells/*/run/job.json"))
    return cells or [given]


def _steps(run: Record) -> Iterable[tuple[Layout, Mapping[str, Any]]]:
    """What each step took, with its layout, behind the first ones of each generation."""
    seen: dict[int, int] = defaultdict(int)
    for line in run.steps:
        generation = line.get("generation", 0)
        if type(generation) is not int:
            continue
        seen[generation] += 1
        if seen[generation] > WARM_UP and (layout := _layout_of(run, line)) is not None:
            yield layout, line["seconds"]


def _jitter(by_layout: Mapping[Layout, Sequence[float]], medians: Mapping[Layout, float]) -> float | None:
    """How far single steps are from the median of their layout: robustly, in logarithms.

    The step of W workers is the slowest one's, which varies less than one worker does; so it is taken of the fewest.
    """
    several = {layout: found for layout, found in by_layout.items() if len(found) >= 10}
    if not several:
        return None
    fewest = min(several, key=lambda layout: layout.workers)
    return min(2.0, NORMAL * median(abs(math.log(each / medians[fewest])) for each in several[fewest]))


def _durations(journals: Sequence[_Journal]) -> dict[str, float]:
    """What all of them come to: medians, and for generations a line over the number of workers."""
    names = {name: None for journal in journals for name in journal.found}
    found = {name: median(chain.from_iterable(journal.found[name] for journal in journals)) for name in names}
    formed, joined = ([each for journal in journals for each in journal.formed[joins]] for joins in (False, True))
    if formed:
        found["form_s"], found["form_each_s"] = _line(formed)
    if joined:
        form_s, each_s = found.get("form_s", 0.0), found.get("form_each_s", 0.0)
        copies = [(workers, max(0.0, took - form_s - workers * each_s)) for workers, took in joined]
        found["copy_s"], found["copy_each_s"] = _line(copies)
    return found


def _line(sizes: Sequence[tuple[int, float]]) -> tuple[float, float]:
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


class _Journal:
    """What the journal of one run says of durations.

    Args:
        run: the run.
        medians: seconds of a step, by layout.

    Attributes:
        found: the durations, by name.
        formed: the number of workers of each generation, and the seconds that it took to form; apart by whether some
            of them were joiners.
    """

    def __init__(self, run: Record, medians: Mapping[Layout, float]) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)
        self.formed: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        self._run, self._medians = run, medians
        self._asked: dict[str, tuple[str, int]] = {}  # by worker: the figure, and the number of the order
        self._orders = 0
        self._ready: dict[int, list[float]] = {}  # by order: seconds until each was ready
        self._cold: set[str] = set()  # hosts that have not started a worker yet
        self._lost_at: float | None = None
        self._minted: tuple[float, int, bool] | None = None  # when members had ended, their number, whether some join
        self._by_number = {line["step"]: line for line in run.steps if _is_count(line["step"])}
        self._ends = [(line["time"], line) for line in run.steps if _is_moment(line.get("time"))]
        for line in run.journal:
            self._note(line)

    def _note(self, line: Mapping[str, Any]) -> None:
        """One event more."""
        at, took = moment_of(line), line.get("seconds")
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
            case "checkpoint" if _is_duration(took):
                self._note_duration("checkpoint_s", float(took))
                self._note_stall(line.get("step"))

    def _note_minted(self, line: Mapping[str, Any], at: float) -> None:
        joined, workers, ready = _names(line.get("joined")), _names(line.get("workers")), line.get("ready")
        if isinstance(ready, list) and len(ready) == len(joined):
            self._note_ready({name: took for name, took in zip(joined, ready, strict=True) if _is_duration(took)})
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
        layout = _layout_of(self._run, last)
        return 0.0 if layout is None else ended + self._medians.get(layout, 0.0)

    def _note_formed(self, generation: Any, at: float, ended_at: float, workers: int, joined: bool) -> None:
        self._minted = None
        took = at - ended_at + self._first_steps(generation, at)
        if at >= ended_at and _is_duration(took) and workers:
            self.formed[joined].append((workers, took))

    def _first_steps(self, generation: Any, formed_at: float) -> float:
        """What the first steps of a generation took longer than later ones."""
        first = [line for line in self._run.steps if line.get("generation") == generation][:WARM_UP]
        layout = _layout_of(self._run, first[-1]) if first else None
        ended = first[-1].get("time") if first else None
        if layout is None or layout not in self._medians or not _is_moment(ended):
            return 0.0
        return max(0.0, ended - formed_at - len(first) * self._medians[layout])

    def _note_stall(self, step: Any) -> None:
        """Beside the median, what the step took in which a checkpoint was written."""
        line = self._by_number.get(step) if _is_count(step) else None
        layout = None if line is None else _layout_of(self._run, line)
        if line is not None and layout is not None and layout in self._medians:
            self._note_duration("stall_s", max(0.0, line["seconds"]["total"] - self._medians[layout]))

    def _note_duration(self, name: str, seconds: float) -> None:
        if _is_duration(seconds):  # no clock was put back
            self.found[name].append(seconds)


def _layout_of(run: Record, line: Mapping[str, Any]) -> Layout | None:
    """The layout of a step; None if the line makes no sense."""
    took, workers, batch = line.get("seconds"), line.get("world_size"), line.get("batch_size")
    total = took.get("total") if isinstance(took, Mapping) else None
    if not _is_count(workers) or not _is_count(batch) or not isinstance(total, float) or not 0 < total < LONGEST_S:
        return None
    if workers > run.job.shards:  # a job never has so many
        return None
    return Layout(workers, batch, run.job.shards)


def _is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a number of something."""
    return type(value) is int and 0 < value < 2**53


def _is_duration(value: Any) -> TypeGuard[float]:
    """Whether it is a number of seconds; two of them may be added up."""
    return type(value) in (int, float) and 0 <= value < LONGEST_S / 2


def _names(found: Any) -> list[str]:
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _is_moment(value: Any) -> TypeGuard[float]:
    """Whether it is a time in seconds since 1970, which are more than any duration."""
    return type(value) in (int, float) and 0 <= value < 2**40
