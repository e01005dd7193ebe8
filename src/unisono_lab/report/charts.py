"""The pictures of a study, each a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono_lab.analysis.analysis import Analysis, Curve
from unisono_lab.analysis.batch_curve import BatchCurve
from unisono_lab.analysis.estimate import Estimate, shown
from unisono_lab.analysis.results import Mode
from unisono_lab.analysis.summary import PARTS, Row
from unisono_lab.timeline.picture import FAINT, INK

PAPER = "#ffffff"

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
"""After Okabe and Ito, whose colours people with any kind of colour vision can tell apart; shapes differ, too."""

SHAPES = ("o", "s", "^", "D", "v", "P")

PART_COLOURS: Mapping[str, str] = {
    "data_s": "#56b4e9",
    "compute_s": "#0072b2",
    "exposed_s": "#d55e00",
    "wait_s": "#e69f00",
    "update_s": "#009e73",
}

WIDTH, HEIGHT = 4.9, 3.3
"""Inches."""

LINEAR = 16
"""Workers up to which the axes are linear; beyond, each step doubles."""

ROOM = 1.06
"""Of an axis that begins at 0: its end, as a multiple of what lies on it."""

Value = Callable[[Row], "Estimate | None"]


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture.

    Attributes:
        name: the name of its files, without an ending.
        title: the chart's title.
        words: the same for who cannot see it, and how to read it.
        figure: matplotlib's.
    """

    name: str
    title: str
    words: str
    figure: Any


def charts(analysis: Analysis) -> list[Chart]:
    """All that there are figures for, strong and weak scaling apart."""
    found = []
    for mode in analysis.modes:
        curves = analysis.of(mode)
        found += [
            chart
            for make in (_epochs, _throughputs, _speedups, _efficiencies, _breakdown)
            if (chart := make(curves, mode))
        ]
    return [*found, *_batches(analysis.batches)]


def _epochs(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    if not any(row.epoch_s for curve in curves for row in curve.rows):
        return None
    figure, axis = _canvas(curves, "seconds of an epoch")
    for place, curve in enumerate(curves):
        _plot(axis, curve, lambda row: row.epoch_s, _Look(place, _names(curves)))
        alone = curve.usable[0].epoch_s if curve.usable and curve.usable[0].workers == 1 else None
        if alone is not None:
            _ideal(axis, curve.usable[-1].workers, alone.value, power=-1)
    from_zero(axis)
    explain(figure, axis)
    words = (
        "Median seconds of an epoch, with 95 % intervals. Dotted: ideal, those of one worker divided by the workers."
    )
    return Chart(f"epoch-time-{mode}", f"Epoch time, {mode} scaling", words, figure)


def _throughputs(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    figure, axis = _canvas(curves, "samples / s")
    for place, curve in enumerate(curves):
        _dots(axis, curve, place)
        _plot(axis, curve, lambda row: row.samples_per_s, _Look(place, _names(curves)))
        if curve.usable and curve.usable[0].workers == 1:
            _ideal(axis, curve.usable[-1].workers, curve.usable[0].samples_per_s.value, power=1)
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
        colour = _colour(place) if row.label and len(curves) > 1 else INK
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
        _plot(axis, curve, lambda row: row.speedup, _Look(place, _names(curves), line="none"))
        fit = curve.best_fit
        if fit is not None and curve.usable[0].workers == 1:
            grid = _grid(far)
            style = {"linestyle": "--", "linewidth": 1.1, "color": _colour(place)}
            axis.plot(grid, [fit.speedup(at) for at in grid], label=f"fit: {fit.law.short}", **style)
            beyond = [workers for workers in curve.predict if workers <= far]
            open_marks = {"marker": SHAPES[place % len(SHAPES)], "markerfacecolor": "none", "markersize": 7}
            look = {**open_marks, "color": _colour(place), "linestyle": "none"}
            axis.plot(beyond, [fit.speedup(workers) for workers in beyond], label="prediction", **look)
    if far <= LINEAR:
        from_zero(axis)
    explain(figure, axis)
    words = "Against one worker. Dotted: ideal, S = W. Dashed: the law that fits best; open marks are its predictions."
    return Chart(f"speedup-{mode}", f"Speedup, {mode} scaling", words, figure)


def _efficiencies(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    if not _has_speedups(curves):
        return None
    figure, axis = _canvas(curves, "efficiency, %")
    for place, curve in enumerate(curves):
        _plot(axis, curve, _efficiency, _Look(place, _names(curves)))
    axis.axhline(100, color=INK, linewidth=1, linestyle=":", label="ideal")
    axis.set_ylim(0, max(110.0, axis.get_ylim()[1]))
    explain(figure, axis)
    return Chart(
        f"efficiency-{mode}", f"Efficiency, {mode} scaling", "Speedup per worker. Dotted: ideal, 100 %.", figure
    )


def _has_speedups(curves: Sequence[Curve]) -> bool:
    return any(row.speedup and row.workers > 1 for curve in curves for row in curve.rows)


def _efficiency(row: Row) -> Estimate | None:
    return None if row.efficiency is None else row.efficiency.mapped(lambda share: 100 * share)


def _breakdown(curves: Sequence[Curve], mode: Mode) -> Chart | None:
    """Stacked bars, a panel for each label."""
    panels = [curve for curve in curves if any(row.parts for row in curve.rows)]
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(WIDTH, 2.5 * len(panels)), HEIGHT), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, curve in zip(axes, panels, strict=True):
        style(axis)
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
    handles = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=2, frameon=False, fontsize="small", labelcolor=INK
    )
    words = (
        "Median milliseconds of a step. What does not shrink as workers are added keeps the speedup from being ideal."
    )
    return Chart(f"breakdown-{mode}", f"Where a step's time goes, {mode} scaling", words, figure)


def _batches(curves: Mapping[str, BatchCurve]) -> list[Chart]:
    """Memory and throughput against the batch, in two panels with one axis."""
    found = {label: curve for label, curve in curves.items() if len(curve.fitting) > 1}
    if not found:
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 1.4 * HEIGHT), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for axis in (above, below):
        style(axis)
    for place, (label, curve) in enumerate(found.items()):
        timed = [row for row in curve.fitting if row.samples_per_s]
        weighed = [row for row in curve.fitting if row.peak_mib]
        look = {"color": _colour(place), "marker": SHAPES[place % len(SHAPES)], "linewidth": 1.4, "markersize": 5}
        above.plot(
            [row.batch for row in timed], [row.samples_per_s for row in timed], label=plain_label(label) or None, **look
        )
        below.plot(
            [row.batch for row in weighed], [row.peak_mib for row in weighed], label=plain_label(label) or None, **look
        )
        _mark_batches(above, curve, place)
    above.set_xscale("log", base=2)
    above.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    above.set_ylabel("samples / s")
    below.set_ylabel("peak memory, MiB")
    below.set_xlabel("batch per worker")
    for axis in (above, below):
        from_zero(axis)
    explain(figure, above)
    words = (
        "Throughput and memory against the batch per worker. Beyond the largest batch a step does not fit into memory."
    )
    return [Chart("batch-size", "Batch size", words, figure)]


def _mark_batches(axis: Any, curve: BatchCurve, place: int) -> None:
    for batch, style, name in ((curve.best, "--", "best throughput"), (curve.largest, ":", "largest that fits")):
        if batch:
            axis.axvline(batch, color=_colour(place), linestyle=style, linewidth=1, label=f"{name}: {batch}")


# --- what the pictures have in common


def _canvas(curves: Sequence[Curve], what: str, *, predicted: bool = False) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axis = figure.subplots()
    style(axis)
    seen = {row.workers for curve in curves for row in curve.rows}
    far = _farthest(curves) if predicted else max(seen)
    if far > LINEAR:
        axis.set_xscale("log", base=2)
        if predicted:
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ticks = sorted({*seen, *(workers for curve in curves for workers in curve.predict if predicted and workers <= far)})
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("workers")
    axis.set_ylabel(what)
    return figure, axis


def _farthest(curves: Sequence[Curve]) -> int:
    """The most workers that a chart goes to: the next prediction beyond what was measured."""
    most = max(row.workers for curve in curves for row in curve.rows)
    return min((workers for curve in curves for workers in curve.predict if workers > most), default=most)


def style(axis: Any) -> None:
    """Make an axis look like all others."""
    axis.spines[["top", "right"]].set_visible(False)
    for spine in axis.spines.values():
        spine.set_color(INK)
    axis.tick_params(colors=INK, which="both")
    axis.xaxis.label.set_color(INK)
    axis.yaxis.label.set_color(INK)
    axis.grid(axis="y", color=FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.patch.set_visible(False)


def from_zero(axis: Any) -> None:
    """With room for the marks above the topmost point."""
    axis.set_ylim(0, ROOM * axis.get_ylim()[1])


@dataclass(frozen=True, slots=True)
class _Look:
    """The look of a curve: its place among others, whether it needs its name, and its line."""

    place: int
    named: bool
    line: str = "-"


def _plot(axis: Any, curve: Curve, value: Value, look: _Look) -> None:
    """Medians with their intervals; a cross, and no line, where workers shared cores."""
    found = [(row.workers, estimate) for row in curve.usable if (estimate := value(row)) is not None]
    if found:
        colour = _colour(look.place)
        below = [0.0 if one.low is None else one.value - one.low for _, one in found]
        above = [0.0 if one.high is None else one.high - one.value for _, one in found]
        style = {"marker": SHAPES[look.place % len(SHAPES)], "markersize": 5.5, "capsize": 3, "linewidth": 1.4}
        label = plain_label(curve.label) if look.named else "measured"
        workers, values = [workers for workers, _ in found], [one.value for _, one in found]
        axis.errorbar(
            workers, values, [below, above], color=colour, linestyle=look.line, label=label, zorder=3, **style
        )
    crowded = [(row.workers, estimate.value) for row in curve.crowded if (estimate := value(row)) is not None]
    if crowded:
        style = {"color": _colour(look.place), "markersize": 9, "linestyle": "none", "markeredgewidth": 1.6}
        axis.plot(*zip(*crowded, strict=True), "x", label="shared cores: no scaling", zorder=4, **style)


def _dots(axis: Any, curve: Curve, place: int) -> None:
    look = {"color": _colour(place), "alpha": 0.35, "markersize": 5, "zorder": 2}
    for row in curve.rows:
        if len(row.rates) > 1:
            axis.plot([row.workers] * len(row.rates), row.rates, ".", **look)


def _ideal(axis: Any, most: int, alone: float, *, power: int) -> None:
    """One worker's figure, as it would grow or fall if all went well."""
    grid = _grid(most)
    axis.plot(grid, [alone * at**power for at in grid], ":", color=INK, linewidth=1, label="ideal", zorder=1)


def _grid(most: int) -> list[float]:
    return [1 + (most - 1) * part / 60 for part in range(61)]


def explain(figure: Any, axis: Any) -> None:
    """A legend above the axes, each name once, what was measured first."""
    handles, labels = axis.get_legend_handles_labels()
    measured = [(label, handle) for label, handle in zip(labels, handles, strict=True) if hasattr(handle, "has_yerr")]
    kept = {**dict(measured), **dict(reversed(list(zip(labels, handles, strict=True))))}
    order = [*dict(measured), *(label for label in dict.fromkeys(labels) if label not in dict(measured))]
    if order:
        look = {
            "ncols": 3 if max(map(len, order)) < 14 else 2,
            "fontsize": "small",
            "frameon": False,
            "labelcolor": INK,
        }
        figure.legend([kept[label] for label in order], order, loc="outside upper left", **look)


def _names(curves: Sequence[Curve]) -> bool:
    """Whether curves need their labels."""
    return len(curves) > 1 or bool(curves[0].label)


def plain_label(label: str) -> str:
    """A label that matplotlib takes as it is: no formulas, and none that it would hide."""
    words = shown(label, 28).replace("$", r"\$")
    return f" {words}" if words.startswith("_") else words


def _colour(place: int) -> str:
    return SERIES[place % len(SERIES)]
