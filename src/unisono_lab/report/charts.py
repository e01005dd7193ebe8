"""The pictures of a study, each a matplotlib figure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from unisono.errors import JobError
from unisono_lab.recorded.explanation import NAMES, Explanation, Lane, Part, explained
from unisono_lab.recorded.worker_spans import StepTimelines, read
from unisono_lab.report.drawing import (
    BLUE,
    FAINT,
    GREEN,
    HEIGHT,
    INK,
    ORANGE,
    PAPER,
    PINK,
    RED,
    SKY,
    WIDTH,
    Chart,
    canvas,
    doubling,
    explain,
    explain_below,
    from_zero,
    mark,
    panels,
    plain_numbers,
)
from unisono_lab.study.analysis import PARTS, Analysis, Curve, Row
from unisono_lab.study.estimate import Estimate, counted, shown
from unisono_lab.study.results import BatchCurve, Mode

PART_COLOURS: Mapping[str, str] = dict(zip(PARTS, (SKY, BLUE, RED, ORANGE, GREEN), strict=True))

LINEAR = 16
"""The largest number of workers for which axes are linear; for more, each step doubles."""

Value = Callable[[Row], "Estimate | None"]


def charts(analysis: Analysis) -> list[Chart]:
    """The charts for which there are figures; strong and weak scaling have charts of their own."""
    kinds = (_epochs, _throughputs, _speedups, _efficiencies, _breakdown)
    scaling_charts = [make_chart(analysis.of(mode), mode) for mode in analysis.modes for make_chart in kinds]
    return [chart for chart in (*scaling_charts, _batches(analysis.batches)) if chart]


def _epochs(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    if not any(row.epoch_s for curve in curves for row in curve.rows):
        return None
    figure, axis = _canvas(curves, "seconds of an epoch")
    for place, curve in enumerate(curves):
        _plot(axis, curves, place, lambda row: row.epoch_s)
        if curve.alone is not None and curve.alone.epoch_s is not None:
            _ideal(axis, curve.usable[-1].workers, curve.alone.epoch_s.value, power=-1)
    from_zero(axis)
    explain(figure, axis)
    words = (
        "Median seconds of an epoch, with 95 % intervals. Dotted: ideal, those of one worker divided by the workers."
    )
    return Chart(f"epoch-time-{mode}", f"Epoch time, {mode} scaling", words, figure)


def _throughputs(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    figure, axis = _canvas(curves, "samples / s")
    for place, curve in enumerate(curves):
        for row in curve.rows:
            if len(row.rates) > 1:
                look = {"color": mark(place)["color"], "alpha": 0.35, "markersize": 5, "zorder": 2}
                axis.plot([row.workers] * len(row.rates), row.rates, ".", **look)
        _plot(axis, curves, place, lambda row: row.samples_per_s)
        if curve.alone is not None:
            _ideal(axis, curve.usable[-1].workers, curve.alone.samples_per_s.value, power=1)
    _plain_loops(axis, curves)
    from_zero(axis)
    explain(figure, axis)
    words = "Samples per second: medians with 95 % intervals, and each run as a faint dot. Dotted: ideal."
    return Chart(f"throughput-{mode}", f"Throughput, {mode} scaling", words, figure)


def _plain_loops(axis: Any, curves: Sequence[Curve]) -> None:
    """Draw a dash for each plain loop, in the colour of its curve; the legend names them once."""
    look = {"linestyle": "none", "marker": "_", "markersize": 16, "markeredgewidth": 1.6, "zorder": 4}
    plain = [(place, row) for place, curve in enumerate(curves) for row in curve.plain]
    for place, row in plain:
        colour = mark(place)["color"] if row.label and len(curves) > 1 else INK
        axis.plot([row.workers], [row.samples_per_s.value], color=colour, **look)
    if plain:
        label = "plain loop" + (", equal threads" if any(row.workers > 1 for _, row in plain) else "")
        axis.plot([], [], color=INK, label=label, **look)


def _speedups(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    """The speedups, with the fits and their predictions."""
    if not _has_speedups(curves):
        return None
    figure, axis = _canvas(curves, "speedup", predicted=True)
    largest = _farthest(curves)
    _ideal(axis, largest, 1.0, power=1)
    for place, curve in enumerate(curves):
        _plot(axis, curves, place, lambda row: row.speedup, line="none")
        fit = curve.best_fit
        if fit is not None and curve.alone is not None:
            grid, look = _grid(largest), mark(place)
            style = {"linestyle": "--", "linewidth": 1.1, "color": look["color"]}
            axis.plot(grid, [fit.speedup(at) for at in grid], label=f"fit: {fit.law.name}", **style)
            predicted = [workers for workers in curve.predict if workers <= largest]
            open_marks = {**look, "markerfacecolor": "none", "markersize": 7, "linestyle": "none"}
            axis.plot(predicted, [fit.speedup(workers) for workers in predicted], label="prediction", **open_marks)
    if largest <= LINEAR:
        from_zero(axis)
    explain(figure, axis)
    words = "Against one worker. Dotted: ideal, S = W. Dashed: the law that fits best; open marks are its predictions."
    return Chart(f"speedup-{mode}", f"Speedup, {mode} scaling", words, figure)


def _efficiencies(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    if not _has_speedups(curves):
        return None
    figure, axis = _canvas(curves, "efficiency, %")
    for place in range(len(curves)):
        _plot(axis, curves, place, lambda row: row.efficiency and row.efficiency.mapped(lambda share: 100 * share))
    axis.axhline(100, color=INK, linewidth=1, linestyle=":", label="ideal")
    axis.set_ylim(0, max(110.0, axis.get_ylim()[1]))
    explain(figure, axis)
    words = "Speedup per worker. Dotted: ideal, 100 %."
    return Chart(f"efficiency-{mode}", f"Efficiency, {mode} scaling", words, figure)


def _has_speedups(curves: Sequence[Curve]) -> bool:
    return any(row.speedup and row.workers > 1 for curve in curves for row in curve.rows)


def _breakdown(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    """Stacked bars, a panel for each label."""
    shown_curves = [curve for curve in curves if any(row.parts for row in curve.rows)]
    if not shown_curves:
        return None
    figure, (axes,) = panels(1, len(shown_curves), max(WIDTH, 2.5 * len(shown_curves)))
    for axis, curve in zip(axes, shown_curves, strict=True):
        rows = [row for row in curve.rows if row.parts]
        bottoms = [0.0] * len(rows)
        for part, name in PARTS.items():
            heights = [1000 * (row.parts or {}).get(part, 0.0) for row in rows]
            if any(heights):
                look = {"color": PART_COLOURS[part], "label": name, "edgecolor": PAPER, "linewidth": 0.5}
                axis.bar(range(len(rows)), heights, 0.62, bottoms, **look)
            bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
        axis.set_xticks(range(len(rows)), [f"{row.workers}{'*' if row.oversubscribed else ''}" for row in rows])
        axis.set_xlabel("workers")
        axis.set_title(plain_label(curve.label), fontsize="medium", color=INK)
    axes[0].set_ylabel("ms of a step")
    explain_below(figure, axes, 2)
    words = (
        "Median milliseconds of a step. Parts that do not shrink with more workers keep the speedup from being ideal."
    )
    return Chart(f"breakdown-{mode}", f"Where a step's time goes, {mode} scaling", words, figure)


def _batches(curves: Mapping[str, BatchCurve]) -> Chart | None:
    """Memory and throughput against the batch, in two panels with one axis."""
    searches = {label: curve for label, curve in curves.items() if len(curve.fitting) > 1}
    if not searches:
        return None
    figure, ((above,), (below,)) = panels(2, 1, height=1.4 * HEIGHT, sharex=True)
    for axis, field, name in ((above, "samples_per_s", "samples / s"), (below, "peak_mib", "peak memory, MiB")):
        for place, (label, curve) in enumerate(searches.items()):
            points = [(row.batch, value) for row in curve.fitting if (value := getattr(row, field))]
            look = {**mark(place), "label": plain_label(label) or None, "linewidth": 1.4, "markersize": 5}
            axis.plot([batch for batch, _ in points], [value for _, value in points], **look)
            if axis is above:
                _mark_batches(axis, curve, mark(place)["color"])
        axis.set_ylabel(name)
        from_zero(axis)
    doubling(above, "x")
    below.set_xlabel("batch per worker")
    explain(figure, above)
    words = (
        "Throughput and memory against the batch per worker. Beyond the largest batch a step does not fit into memory."
    )
    return Chart("batch-size", "Batch size", words, figure)


def _mark_batches(axis: Any, curve: BatchCurve, colour: str) -> None:
    for batch, style, name in ((curve.best, "--", "best throughput"), (curve.largest, ":", "largest that fits")):
        if batch:
            axis.axvline(batch, color=colour, linestyle=style, linewidth=1, label=f"{name}: {batch}")


# What the charts have in common.


def _canvas(curves: Sequence[Curve], label: str, *, predicted: bool = False) -> tuple[Any, Any]:
    figure, axis = canvas("workers", label)
    measured = {row.workers for curve in curves for row in curve.rows}
    largest = _farthest(curves) if predicted else max(measured)
    if largest > LINEAR:
        doubling(axis, "x")
        if predicted:
            doubling(axis, "y")
    predictions = {workers for curve in curves for workers in curve.predict if predicted and workers <= largest}
    axis.set_xticks(sorted({*measured, *predictions}))
    axis.set_xticks([], minor=True)
    plain_numbers(axis.xaxis)
    return figure, axis


def _farthest(curves: Sequence[Curve]) -> int:
    """The most workers on the axis of a chart: the first prediction beyond the measured numbers."""
    largest = max(row.workers for curve in curves for row in curve.rows)
    return min((workers for curve in curves for workers in curve.predict if workers > largest), default=largest)


def _plot(axis: Any, curves: Sequence[Curve], place: int, value: Value, line: str = "-") -> None:
    """Draw the medians of a curve with their intervals; rows whose workers shared cores are crosses without a line."""
    curve, look = curves[place], mark(place)
    measured = [(row.workers, estimate) for row in curve.usable if (estimate := value(row)) is not None]
    if measured:
        below = [0.0 if figure.low is None else figure.value - figure.low for _, figure in measured]
        above = [0.0 if figure.high is None else figure.high - figure.value for _, figure in measured]
        label = plain_label(curve.label) if len(curves) > 1 or curve.label else "measured"
        points = ([workers for workers, _ in measured], [figure.value for _, figure in measured], [below, above])
        style = {"linestyle": line, "markersize": 5.5, "capsize": 3, "linewidth": 1.4, "zorder": 3}
        axis.errorbar(*points, label=label, **style, **look)
    crowded = [(row.workers, estimate.value) for row in curve.crowded if (estimate := value(row)) is not None]
    if crowded:
        style = {"color": look["color"], "markersize": 9, "linestyle": "none", "markeredgewidth": 1.6, "zorder": 4}
        axis.plot(*zip(*crowded, strict=True), "x", label="shared cores: no scaling", **style)


def _ideal(axis: Any, most: int, alone: float, *, power: int) -> None:
    """Draw the ideal: one worker's figure times workers to this power."""
    grid = _grid(most)
    axis.plot(grid, [alone * workers**power for workers in grid], ":", color=INK, linewidth=1, label="ideal", zorder=1)


def _grid(most: int) -> list[float]:
    return [1 + (most - 1) * part / 60 for part in range(61)]


def plain_label(label: str) -> str:
    """A label without what matplotlib would interpret: ``$`` starts a formula, and a leading ``_`` hides a label."""
    words = shown(label, 28).replace("$", r"\$")
    return f" {words}" if words.startswith("_") else words


COLOURS: Final[Mapping[Part, str]] = {
    "data": "#f0e442",
    "forward": SKY,
    "backward": BLUE,
    "compute": "#999999",
    "communication": RED,
    "update": GREEN,
    "regroup": PINK,
    "script": FAINT,
}
"""Colours of Okabe and Ito, which people with any kind of colour vision can tell apart."""

MAIN, BESIDE = 0.5, 0.18
"""The heights of a worker's bars: the main thread's, and the reducer's."""

MOST_LANES = 64
"""The most workers that are drawn: those on the critical path first, then the others by rank."""

CELL = re.compile(r"(strong|weak)-([0-9]{1,6})-0")
"""The folder of a cell's first repeat, which is the one that is shown."""

WIDEST = 110
"""The most characters of a line in the title."""


def step_charts(studies: Sequence[Path]) -> list[Chart]:
    """A chart of the median step for each study and mode, with the activities of each worker over time.

    The run is the first repeat with the most workers. Runs without a timeline are left out.
    """
    step_pictures = list[Chart]()
    for study in studies:
        cells: dict[str, int] = {}
        for folder in sorted((study / "cells").glob("*")):
            if (name := CELL.fullmatch(folder.name)) is not None:
                cells[name[1]] = max(cells.get(name[1], 0), int(name[2]))
        label = f"{study.absolute().name}: " if len(studies) > 1 else ""
        for mode, workers in cells.items():
            try:
                timelines = read([study / "cells" / f"{mode}-{workers}-0" / "run"])
                step = explained(timelines)
            except JobError:  # an older version measured it without a timeline, or it took too few steps
                continue
            title = f"{label}one step of {counted(workers, 'worker')}, {mode} scaling"
            step_pictures.append(
                Chart(f"step-{len(step_pictures) + 1}", title, " ".join(step.words), step_figure(timelines, step))
            )
    return step_pictures


def step_figure(timelines: StepTimelines, explanation: Explanation) -> Any:
    """The median step, as a matplotlib figure."""
    places = _lanes_of(explanation)
    figure, axis = canvas("ms", "", 9, 2.0 + 0.55 * len(places))
    lanes = {place: Lane(place, explanation.workers[place]) for place in places}
    zero = min(lane.begun for lane in lanes.values())
    for row, lane in enumerate(lanes.values()):
        _bars(axis, lane, row, zero)
    _path(axis, explanation, {place: row for row, place in enumerate(places)}, zero)
    axis.set_yticks(range(len(places)), [_plain(timelines.workers[place].name) for place in places])
    axis.set_ylim(len(places) - 0.4, -0.6)
    axis.spines["left"].set_visible(False)
    axis.tick_params(left=False)
    axis.grid(visible=False, axis="y")
    axis.grid(axis="x", color=FAINT, linewidth=0.6)
    words = "\n".join(textwrap.fill(_plain(sentence), WIDEST) for sentence in explanation.words)
    axis.set_title(words, loc="left", fontsize="small", color=INK)
    explain_below(figure, [axis], 4)
    return figure


def _lanes_of(explanation: Explanation) -> list[int]:
    ranks = {place: step.rank for place, step in explanation.workers.items()}
    on_path = {stretch.worker for stretch in explanation.path}
    chosen = sorted(ranks, key=lambda place: (place not in on_path, ranks[place]))[:MOST_LANES]
    return sorted(chosen, key=lambda place: ranks[place])


def _bars(axis: Any, lane: Lane, row: int, zero: int) -> None:
    by_part: dict[Part, list[tuple[float, float]]] = {}
    for segment in lane.segments:
        if segment.begun >= lane.begun:
            by_part.setdefault(segment.part, []).append(_bar(segment.begun, segment.ended, zero))
    for part in NAMES:
        if part in by_part:
            axis.broken_barh(by_part[part], (row - MAIN / 2, MAIN), color=COLOURS[part], label=NAMES[part], linewidth=0)
    beside = [_bar(span.begun, span.ended, zero) for span in lane.step.spans if not span.on_main]
    if beside:
        axis.broken_barh(beside, (row + MAIN / 2, BESIDE), color=ORANGE, label="reductions beside it", linewidth=0)


def _bar(begun: int, ended: int, zero: int) -> tuple[float, float]:
    return (begun - zero) / 1e6, (ended - begun) / 1e6


def _path(axis: Any, explanation: Explanation, rows: Mapping[int, int], zero: int) -> None:
    """Draw the critical path: a line along its bars, and from worker to worker."""
    drawn = [stretch for stretch in explanation.path if stretch.worker in rows]
    heights = [rows[stretch.worker] - MAIN / 2 - 0.05 for stretch in drawn]
    style = {"color": INK, "solid_capstyle": "butt", "zorder": 4}
    for stretch, height in zip(drawn, heights, strict=True):
        x, width = _bar(stretch.begun, stretch.ended, zero)
        axis.plot([x, x + width], [height, height], linewidth=3, label="critical path", **style)
    for (before, after), ends in zip(pairwise(drawn), pairwise(heights), strict=True):
        if before.worker != after.worker:
            x, _ = _bar(after.begun, after.ended, zero)
            axis.plot([x, x], ends, color=INK, linewidth=1, zorder=4)


def _plain(text: str) -> str:
    """The text without formulas for matplotlib, which ``$`` would start."""
    return text.replace("$", r"\$")
