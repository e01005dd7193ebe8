"""What studies and runs say of the figures of a simulation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from unisono.adapt.layout_trials import Layout
from unisono.adapt.step_time import StepTime, fit
from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono_lab.replay.record import Record
from unisono_lab.simulation.measured_events import WARM_UP, MeasuredEvents, is_count, is_duration, layout_of
from unisono_lab.simulation.scenario import MeasuredFigures

NORMAL = 1.4826
"""Of a normal distribution, the standard deviation as a multiple of the median absolute deviation."""

MOST_BYTES_PER_S = 1e15
"""More than any network carries."""

GROWING = 0.5
"""The share of a reduction that is taken to grow with the number of workers, if a single number was measured."""


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
    events = MeasuredEvents()
    for run in runs:
        own: dict[Layout, list[float]] = defaultdict(list)
        for layout, took in _steps(run):
            own[layout].append(took["total"])
            if is_duration(part := took.get("compute")) and part:
                computed[layout].append(float(part))
        events.read(run, {layout: median(found) for layout, found in own.items()})
        for layout, found in own.items():
            by_layout[layout] += found
    if folders and not by_layout:
        raise JobError(f"{', '.join(map(str, folders))}: no step behind the first {WARM_UP} is recorded there")
    medians = {layout: median(found) for layout, found in by_layout.items()}
    durations = events.durations()
    if (jitter := _jitter(by_layout, medians)) is not None:
        durations["jitter"] = jitter
    link, damaged = _link(runs), [words for run in runs for words in run.damaged]
    if not medians:
        return MeasuredFigures(seconds=durations, link=link, damaged=damaged)
    step = fit(medians, {layout: median(found) for layout, found in computed.items()})
    step, guessed = with_guesses(step, medians)
    return MeasuredFigures(step, durations, max(layout.workers for layout in medians), guessed, link, damaged)


def with_guesses(step: StepTime, seen: Collection[Layout]) -> tuple[StepTime, frozenset[str]]:
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
        if not isinstance(reduction, Mapping) or not is_count(workers) or not is_count(size):
            continue
        latency_s, bytes_per_s = reduction.get("latency_s"), reduction.get("bandwidth_bytes_per_s")
        if is_duration(latency_s) and isinstance(bytes_per_s, float) and 0 < bytes_per_s < MOST_BYTES_PER_S:
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
        if seen[generation] > WARM_UP and (layout := layout_of(run, line)) is not None:
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
