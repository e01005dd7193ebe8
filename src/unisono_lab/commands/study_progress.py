"""The progress of ``unisono study`` while it measures: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from unisono_lab.analysis.study_folder import PlannedCell
from unisono_lab.measure.measured_run import MeasuredRun
from unisono_lab.measure.measuring import Missing

MINUTE_S, HOUR_S = 60, 3600


class TimeLeft(ProgressColumn):
    """Counts down until all runs should be over.

    Attributes:
        ends: the expected end, on the monotonic clock; None if it is not known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ends: float | None = None

    def render(self, task: Task) -> Text:
        """What is left."""
        return Text("" if self.ends is None else f"{roughly(max(self.ends - monotonic(), 0))} left")


class StudyProgress:
    """Shows runs as they begin and end, on stderr. A context.

    Args:
        cells: the number of all runs.
        done: the number of runs that were measured before.
        console: the console to draw on; by default stderr.
    """

    def __init__(self, cells: int, done: int = 0, console: Console | None = None) -> None:
        self._cells, self._done = cells, done
        self._console = console or Console(file=sys.stderr, highlight=False, emoji=False)
        self._left = TimeLeft()
        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            self._left,
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=cells, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    @contextmanager
    def running(self, cell: PlannedCell, left_s: float | None) -> Iterator[None]:
        """A run is under way until the context ends."""
        self._left.ends = None if left_s is None else monotonic() + left_s
        self._bar.reset(self._task, total=self._cells, completed=self._done, description=f"{cell}")
        left = "" if left_s is None else f", {roughly(left_s)} left"
        if not self._console.is_terminal:
            self._say(Text(f"run {self._done + 1} of {self._cells}: {cell}{left}"))
        yield

    def measured(self, cell: PlannedCell, run: MeasuredRun) -> None:
        """A run is over."""
        self._over()
        epoch = "" if run.epoch_s is None else f", {run.epoch_s:.3g} s per epoch"
        self._say(Text(f"{cell}: {run.samples / run.seconds:.4g} samples/s{epoch}"))

    def failed(self, missing: Missing) -> None:
        """A run is over, and there are no figures."""
        self._over()
        self._say(Text(f"{missing.cell}: FAILED: {missing.words} (log: {missing.log})", "red"))

    def _over(self) -> None:
        self._done += 1
        self._bar.update(self._task, completed=self._done)

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def roughly(seconds: float) -> str:
    """A guess at what is left, for people: ``40 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    minutes = round(seconds / MINUTE_S)
    if seconds < 2 * HOUR_S:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
