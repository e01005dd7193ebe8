"""The pictures of a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from unisono_lab.analysis.estimate import number
from unisono_lab.report.charts import HEIGHT, SERIES, SHAPES, WIDTH, Chart, explain, from_zero, style
from unisono_lab.simulation.search import Candidate, frontier
from unisono_lab.simulation.simulated_run import SimulatedOutcome
from unisono_lab.simulation.simulation import Simulation
from unisono_lab.timeline.picture import FAINT, INK

HOUR_S = 3600.0

LEAST_SPAN = 0.1
"""Of an axis: what it shows at least, as a share of the largest value."""

LETTER = 0.022
"""The width of a letter beside a mark, as a share of the axis."""


def simulated_charts(found: Simulation) -> list[Chart]:
    """Time and cost of all seeds, a job over time, throughputs, and the candidates if there are any."""
    said = f" An {_beyond(found)}." if found.is_extrapolation else ""
    made = [_spread(found), _course(found), _rates(found), *([_frontier(found)] if found.candidates else [])]
    return [Chart(one.name, one.title, one.words + said, _marked(one.figure, found)) for one in made]


def _marked(figure: Any, found: Simulation) -> Any:
    if found.is_extrapolation:
        figure.supxlabel(_beyond(found), x=0.995, ha="right", fontsize="x-small", color=SERIES[1])
    return figure


def _beyond(found: Simulation) -> str:
    most = found.scenario.measured_to
    return f"extrapolation beyond {most} workers" if most else "extrapolation: nothing was measured"


def _canvas(across: str, up: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axis = figure.subplots()
    style(axis)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    return figure, axis


def _spread(found: Simulation) -> Chart:
    figure, axis = _canvas("hours", "cost")
    for place, variant in enumerate(found.variants):
        done = [each for each in variant.outcomes if each.done]
        look = {"color": SERIES[place % len(SERIES)], "marker": SHAPES[place % len(SHAPES)], "alpha": 0.75}
        axis.scatter([each.seconds / HOUR_S for each in done], [each.cost for each in done], label=variant.name, **look)
    deadline_h = None if found.wish.deadline_s is None else found.wish.deadline_s / HOUR_S
    several = [each for variant in found.variants for each in variant.outcomes if each.done]
    _limit(axis.axvline, axis.set_xlim, [each.seconds / HOUR_S for each in several], ("deadline", deadline_h, ":"))
    _limit(axis.axhline, axis.set_ylim, [each.cost for each in several], ("budget", found.wish.budget, "--"))
    explain(figure, axis)
    words = "Each mark is a seed: the hours until the job was done, and what all hosts cost until then."
    return Chart("time-and-cost", "Time and cost", words, figure)


def _limit(
    line: Callable[..., Any],
    bounds: Callable[[float, float], Any],
    values: Sequence[float],
    limit: tuple[str, float | None, str],
) -> None:
    """Have an axis show all values, and a limit if it is near them; else the legend says where it is."""
    name, at, look = limit
    low, high = min(values), max(values)
    near = max(high - low, LEAST_SPAN * high, 1e-9)
    if at is not None and low - near <= at <= high + near:
        line(at, color=INK, linestyle=look, label=name)
        low, high = min(low, at), max(high, at)
    elif at is not None:
        line(math.nan, color=INK, linestyle=look, label=f"{name} {number(at)}: outside")
    room = max(0.15 * (high - low), LEAST_SPAN * high / 2)
    bounds(max(0.0, low - room), high + room)


def _course(found: Simulation) -> Chart:
    """Of the seed in the middle."""
    outcome = _middle(found)
    figure, axis = _canvas("hours", "workers")
    hours = [mark.seconds / HOUR_S for mark in outcome.marks]
    axis.step(hours, [mark.workers for mark in outcome.marks], where="post", color=SERIES[0], label="workers")
    from_zero(axis)
    right = axis.twinx()
    right.spines[["top"]].set_visible(False)
    right.step(hours, [mark.price for mark in outcome.marks], where="post", color=SERIES[1], linewidth=1, label="price")
    right.set_ylabel("price of a worker's hour", color=INK)
    right.set_ylim(0, max(1e-9, 1.3 * max(mark.price for mark in outcome.marks)))
    axis.plot([], [], color=SERIES[1], linewidth=1, label="price")
    explain(figure, axis)
    words = f"Workers, and the price of one, in the job of seed {outcome.seed}, whose time is the median."
    return Chart("course", "One job over time", words, figure)


def _middle(found: Simulation) -> SimulatedOutcome:
    ordered = sorted(found.variants[0].outcomes, key=lambda each: each.seconds if each.done else math.inf)
    return ordered[(len(ordered) - 1) // 2]


def _rates(found: Simulation) -> Chart:
    figure, axis = _canvas("workers", "samples / s")
    workers = [rate.workers for rate in found.rates]
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.plot(workers, [rate.samples_per_s for rate in found.rates], marker="o", color=SERIES[0], label="predicted")
    first = found.rates[0].samples_per_s
    axis.plot(workers, [first * size for size in workers], color=INK, linestyle=":", linewidth=1, label="ideal")
    measured_to = found.scenario.measured_to
    if found.is_extrapolation and measured_to:
        axis.axvspan(measured_to, workers[-1], color=FAINT, alpha=0.5, label="not measured")
    from_zero(axis)
    explain(figure, axis)
    words = (
        "Samples per second of so many workers when nothing goes wrong, by the fitted time of a step with its jitter."
    )
    return Chart("rates", "Throughput by workers", words, figure)


def _frontier(found: Simulation) -> Chart:
    figure, axis = _canvas("hours, median", "cost, median")
    done = [one for one in found.tried if math.isfinite(one.answer.seconds.p50)]
    axis.scatter(*_places(done), color=FAINT, label="tried")
    best = frontier(done)
    axis.plot(*_places(best), color=SERIES[0], marker="o", linewidth=1, label="none is better in both")
    label = "recommended" if found.wish.holds(found.candidates[0].answer) else "nearest to the limits"
    axis.scatter(*_places(found.candidates[:1]), color=SERIES[1], marker="*", s=130, zorder=5, label=label)
    _name(axis, [*found.candidates[:1], *best])
    explain(figure, axis)
    words = "Mixes of hosts by median time and cost, with few seeds. The line joins those that no other beats in both."
    return Chart("candidates", "Cost against time", words, figure)


def _name(axis: Any, several: Sequence[Candidate]) -> None:
    """Write hosts beside their marks, towards the middle, but for those too near to one that is named already."""
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    named: list[tuple[float, float, int]] = []
    for one, hours, cost in zip(several, *_places(several), strict=True):
        across, up, size = (hours - left) / (right - left), (cost - low) / (high - low), len(one.hosts)
        near = any(abs(across - x) < LETTER * max(size, n) and abs(up - y) < 0.08 for x, y, n in named)
        if near or not math.isfinite(hours):
            continue
        named.append((across, up, size))
        is_left = across < 0.5
        look = {"textcoords": "offset points", "fontsize": "x-small", "color": INK, "va": "bottom"}
        axis.annotate(one.hosts, (hours, cost), (6 if is_left else -6, 5), ha="left" if is_left else "right", **look)


def _places(several: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [one.answer.seconds.p50 / HOUR_S for one in several], [one.answer.cost.p50 for one in several]
