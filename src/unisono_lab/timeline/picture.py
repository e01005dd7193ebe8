"""A picture of one step: what each worker did when, with the critical path through it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from unisono.errors import JobError
from unisono_lab.timeline.critical_path import Lane, Part, Stretch
from unisono_lab.timeline.explanation import NAMES, Explanation
from unisono_lab.timeline.recorded import StepTimelines

INK, FAINT = "#1f2328", "#d3d8de"

COLOURS: Final[Mapping[Part, str]] = {
    "data": "#f0e442",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "compute": "#999999",
    "communication": "#d55e00",
    "update": "#009e73",
    "regroup": "#cc79a7",
    "script": FAINT,
}
"""Okabe and Ito's, which people with any kind of colour vision can tell apart."""

HIDDEN = "#e69f00"
"""Reductions beside the computation, on a bar of their own."""

MAIN, BESIDE = 0.5, 0.18
"""Heights of the bars of a worker: of the thread that trains, and of the reducer's."""

MOST_LANES = 64
"""Workers that are drawn: those of the critical path, and the first of the others."""

WIDEST = 110
"""Characters of a line below the picture."""


def draw(timelines: StepTimelines, explanation: Explanation, path: Path) -> None:
    """Draw the median step into a file: PNG, SVG or PDF, by its name.

    Raises:
        JobError: the file cannot be written.
    """
    figure = drawn(timelines, explanation)
    try:
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise JobError(f"--plot {path}: {error}") from error


def drawn(timelines: StepTimelines, explanation: Explanation) -> Any:
    """The matplotlib figure."""
    from matplotlib.figure import Figure

    places = _lanes_of(explanation)
    figure = Figure(figsize=(9, 2.0 + 0.55 * len(places)), layout="constrained")
    axis = figure.subplots()
    lanes = {place: Lane(place, explanation.workers[place]) for place in places}
    zero = min(lane.begun for lane in lanes.values())
    for row, lane in enumerate(lanes.values()):
        _bars(axis, lane, row, zero)
    _path(axis, explanation, {place: row for row, place in enumerate(places)}, zero)
    axis.set_yticks(range(len(places)), [_plain(timelines.workers[place].name) for place in places])
    axis.set_ylim(len(places) - 0.4, -0.6)
    axis.set_xlabel("ms")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    axis.grid(axis="x", color=FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    words = "\n".join(textwrap.fill(_plain(each), WIDEST) for each in explanation.words)
    axis.set_title(words, loc="left", fontsize="small", color=INK)
    handles, labels = axis.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(
        named.values(), named, loc="outside lower center", ncols=4, frameon=False, fontsize="small", labelcolor=INK
    )
    return figure


def _lanes_of(explanation: Explanation) -> list[int]:
    ranks = {place: each.rank for place, each in explanation.workers.items()}
    on_path = {each.worker for each in explanation.path}
    kept = sorted(ranks, key=lambda place: (place not in on_path, ranks[place]))[:MOST_LANES]
    return sorted(kept, key=lambda place: ranks[place])


def _bars(axis: Any, lane: Lane, row: int, zero: int) -> None:
    by_part: dict[Part, list[tuple[float, float]]] = {}
    for each in lane.segments:
        if each.begun >= lane.begun:
            by_part.setdefault(each.part, []).append(_bar(each.begun, each.ended, zero))
    for part in NAMES:
        if part in by_part:
            axis.broken_barh(by_part[part], (row - MAIN / 2, MAIN), color=COLOURS[part], label=NAMES[part], linewidth=0)
    beside = [_bar(one.begun, one.ended, zero) for one in lane.step.spans if not one.on_main]
    if beside:
        axis.broken_barh(beside, (row + MAIN / 2, BESIDE), color=HIDDEN, label="reductions beside it", linewidth=0)


def _bar(begun: int, ended: int, zero: int) -> tuple[float, float]:
    return (begun - zero) / 1e6, (ended - begun) / 1e6


def _path(axis: Any, explanation: Explanation, rows: Mapping[int, int], zero: int) -> None:
    """A line along the bars on which the step's end depends, and from worker to worker."""
    drawn = [each for each in explanation.path if each.worker in rows]
    style = {"color": INK, "solid_capstyle": "butt", "zorder": 4}
    for each in drawn:
        x, width = _bar(each.begun, each.ended, zero)
        height = rows[each.worker] - MAIN / 2 - 0.05
        axis.plot([x, x + width], [height, height], linewidth=3, label="critical path", **style)
    for before, after in pairwise(drawn):
        if before.worker != after.worker:
            _step_over(axis, before, after, rows, zero)


def _step_over(axis: Any, before: Stretch, after: Stretch, rows: Mapping[int, int], zero: int) -> None:
    x = (after.begun - zero) / 1e6
    heights = [rows[one.worker] - MAIN / 2 - 0.05 for one in (before, after)]
    axis.plot([x, x], heights, color=INK, linewidth=1, zorder=4)


def _plain(text: str) -> str:
    """Text that matplotlib takes as it is: no formulas."""
    return text.replace("$", r"\$")
