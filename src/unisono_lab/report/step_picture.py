"""A picture of one step: what each worker did when, with the critical path through it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from unisono.errors import JobError
from unisono_lab.analysis.estimate import counted
from unisono_lab.report.drawing import BLUE, FAINT, GREEN, INK, ORANGE, PINK, RED, SKY, Chart, canvas, explain_below
from unisono_lab.timeline.explanation import NAMES, Explanation, Lane, Part, Stretch, explained
from unisono_lab.timeline.recorded import StepTimelines, read

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
"""Okabe and Ito's, which people with any kind of colour vision can tell apart."""

MAIN, BESIDE = 0.5, 0.18
"""Heights of the bars of a worker: of the thread that trains, and of the reducer's."""

MOST_LANES = 64
"""Workers that are drawn: those of the critical path, and the first of the others."""

CELL = re.compile(r"(strong|weak)-([0-9]{1,6})-0")
"""A cell's folder, of which the first repeat is shown."""

WIDEST = 110
"""Characters of a line below the picture."""


def step_charts(studies: Sequence[Path]) -> list[Chart]:
    """What each worker did when, in the median step of the first run on the most workers, of each study and mode.

    Cells without a timeline are left out.
    """
    found = list[Chart]()
    for study in studies:
        cells: dict[str, int] = {}
        for place in sorted((study / "cells").glob("*")):
            if (name := CELL.fullmatch(place.name)) is not None:
                cells[name[1]] = max(cells.get(name[1], 0), int(name[2]))
        label = f"{study.absolute().name}: " if len(studies) > 1 else ""
        for mode, workers in cells.items():
            try:
                timelines = read([study / "cells" / f"{mode}-{workers}-0" / "run"])
                step = explained(timelines)
            except JobError:  # an older version has measured it, or it took too few steps
                continue
            title = f"{label}one step of {counted(workers, 'worker')}, {mode} scaling"
            found.append(Chart(f"step-{len(found) + 1}", title, " ".join(step.words), step_figure(timelines, step)))
    return found


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
    words = "\n".join(textwrap.fill(_plain(each), WIDEST) for each in explanation.words)
    axis.set_title(words, loc="left", fontsize="small", color=INK)
    explain_below(figure, [axis], 4)
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
        axis.broken_barh(beside, (row + MAIN / 2, BESIDE), color=ORANGE, label="reductions beside it", linewidth=0)


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
