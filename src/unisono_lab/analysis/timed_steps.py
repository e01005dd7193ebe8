"""The median step of a study's runs on the most workers, for its report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import JobError
from unisono_lab.analysis.results import Mode
from unisono_lab.timeline.explanation import Explanation, explained
from unisono_lab.timeline.recorded import StepTimelines, read

CELL = re.compile(r"(strong|weak)-([0-9]{1,6})-0")
"""A cell's folder, of which the first repeat is shown."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What workers did when, in one cell of a study.

    Attributes:
        mode: the cell's mode.
        workers: its number of workers.
        timelines: all of its spans.
        explanation: its median step.
        label: the study's folder, where there are several.
    """

    mode: Mode
    workers: int
    timelines: StepTimelines
    explanation: Explanation
    label: str = ""


def timed_steps(studies: Sequence[Path]) -> list[TimedStep]:
    """Of each study and mode, the cell with the most workers; those without a timeline are left out."""
    found = []
    for study in studies:
        cells: dict[Mode, int] = {}
        for place in sorted((study / "cells").glob("*")):
            if (name := CELL.fullmatch(place.name)) is not None:
                mode: Mode = "weak" if name[1] == "weak" else "strong"
                cells[mode] = max(cells.get(mode, 0), int(name[2]))
        label = study.absolute().name if len(studies) > 1 else ""
        for mode, workers in cells.items():
            try:
                timelines = read([study / "cells" / f"{mode}-{workers}-0" / "run"])
                found.append(TimedStep(mode, workers, timelines, explained(timelines), label))
            except JobError:  # an older version has measured it, or it took too few steps
                continue
    return found
