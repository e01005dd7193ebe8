"""The pictures of a study, each a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono_lab.analysis.analysis import PARTS, Analysis, Curve, Row
from unisono_lab.analysis.batch_curve import BatchCurve
from unisono_lab.analysis.estimate import Estimate, shown
from unisono_lab.analysis.results import Mode
from unisono_lab.report.drawing import (
    BLUE,
    GREEN,
    HEIGHT,
    INK,
    ORANGE,
    PAPER,
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

PART_COLOURS: Mapping[str, str] = dict(zip(PARTS, (SKY, BLUE, RED, ORANGE, GREEN), strict=True))

LINEAR = 16
"""Workers up to which the axes are linear; beyond, each step doubles."""

Value = Callable[[Row], "Estimate | None"]


def charts(analysis: Analysis) -> list[Chart]:
    """All that there are figures for, strong and weak scaling apart."""
    kinds = (_epochs, _throughputs, _speedups, _efficiencies, _breakdown)
    made = [make(analysis.of(mode), mode) for mode in analysis.modes for make in kinds]
    return [chart for chart in (*made, _batches(analysis.batches)) if chart]


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
    """A dash for each, in the colour of the curve that it belongs to; explained once."""
    look = {"linestyle": "none", "marker": "_", "markersize": 16, "markeredgewidth": 1.6, "zorder": 4}
    plain = [(place, row) for place, curve in enumerate(curves) for row in curve.plain]
    for place, row in plain:
        colour = mark(place)["color"] if row.label and len(curves) > 1 else INK
        axis.plot([row.workers], [row.samples_per_s.value], color=colour, **look)
    if plain:
        label = "plain loop" + (", equal threads" if any(row.workers > 1 for _, row in plain) else "")
        axis.plot([], [], color=INK, label=label, **look)


def _speedups(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    """With the fits, and what they predict."""
    if not _has_speedups(curves):
        return None
    figure, axis = _canvas(curves, "speedup", predicted=True)
    far = _farthest(curves)
    _ideal(axis, far, 1.0, power=1)
    for place, curve in enumerate(curves):
        _plot(axis, curves, place, lambda row: row.speedup, line="none")
        fit = curve.best_fit
        if fit is not None and curve.alone is not None:
            grid, look = _grid(far), mark(place)
            style = {"linestyle": "--", "linewidth": 1.1, "color": look["color"]}
            axis.plot(grid, [fit.speedup(at) for at in grid], label=f"fit: {fit.law.name}", **style)
            beyond = [workers for workers in curve.predict if workers <= far]
            open_marks = {**look, "markerfacecolor": "none", "markersize": 7, "linestyle": "none"}
            axis.plot(beyond, [fit.speedup(workers) for workers in beyond], label="prediction", **open_marks)
    if far <= LINEAR:
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
        "Median milliseconds of a step. What does not shrink as workers are added keeps the speedup from being ideal."
    )
    return Chart(f"breakdown-{mode}", f"Where a step's time goes, {mode} scaling", words, figure)


def _batches(curves: Mapping[str, BatchCurve]) -> Chart | None:
    """Memory and throughput against the batch, in two panels with one axis."""
    found = {label: curve for label, curve in curves.items() if len(curve.fitting) > 1}
    if not found:
        return None
    figure, ((above,), (below,)) = panels(2, 1, height=1.4 * HEIGHT, sharex=True)
    for axis, field, name in ((above, "samples_per_s", "samples / s"), (below, "peak_mib", "peak memory, MiB")):
        for place, (label, curve) in enumerate(found.items()):
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


# --- what the pictures have in common


def _canvas(curves: Sequence[Curve], what: str, *, predicted: bool = False) -> tuple[Any, Any]:
    figure, axis = canvas("workers", what)
    seen = {row.workers for curve in curves for row in curve.rows}
    far = _farthest(curves) if predicted else max(seen)
    if far > LINEAR:
        doubling(axis, "x")
        if predicted:
            doubling(axis, "y")
    beyond = {workers for curve in curves for workers in curve.predict if predicted and workers <= far}
    axis.set_xticks(sorted({*seen, *beyond}))
    axis.set_xticks([], minor=True)
    plain_numbers(axis.xaxis)
    return figure, axis


def _farthest(curves: Sequence[Curve]) -> int:
    """The most workers that a chart goes to: the next prediction beyond what was measured."""
    most = max(row.workers for curve in curves for row in curve.rows)
    return min((workers for curve in curves for workers in curve.predict if workers > most), default=most)


def _plot(axis: Any, curves: Sequence[Curve], place: int, value: Value, line: str = "-") -> None:
    """Medians of a curve with their intervals; a cross, and no line, where workers shared cores."""
    curve, look = curves[place], mark(place)
    found = [(row.workers, estimate) for row in curve.usable if (estimate := value(row)) is not None]
    if found:
        below = [0.0 if one.low is None else one.value - one.low for _, one in found]
        above = [0.0 if one.high is None else one.high - one.value for _, one in found]
        label = plain_label(curve.label) if len(curves) > 1 or curve.label else "measured"
        points = ([workers for workers, _ in found], [one.value for _, one in found], [below, above])
        style = {"linestyle": line, "markersize": 5.5, "capsize": 3, "linewidth": 1.4, "zorder": 3}
        axis.errorbar(*points, label=label, **style, **look)
    crowded = [(row.workers, estimate.value) for row in curve.crowded if (estimate := value(row)) is not None]
    if crowded:
        style = {"color": look["color"], "markersize": 9, "linestyle": "none", "markeredgewidth": 1.6, "zorder": 4}
        axis.plot(*zip(*crowded, strict=True), "x", label="shared cores: no scaling", **style)


def _ideal(axis: Any, most: int, alone: float, *, power: int) -> None:
    """One worker's figure, as it would grow or fall if all went well."""
    grid = _grid(most)
    axis.plot(grid, [alone * at**power for at in grid], ":", color=INK, linewidth=1, label="ideal", zorder=1)


def _grid(most: int) -> list[float]:
    return [1 + (most - 1) * part / 60 for part in range(61)]


def plain_label(label: str) -> str:
    """A label that matplotlib takes as it is: no formulas, and none that it would hide."""
    words = shown(label, 28).replace("$", r"\$")
    return f" {words}" if words.startswith("_") else words
