"""The progress display of the main worker: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from unisono.host.status_line import VARIABLE, as_line
from unisono.train.step.step import Step

# What ``fit`` returns: one record per epoch.


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The record of an epoch.

    Attributes:
        epoch: the number of the epoch, from 0.
        loss: the mean training loss over the epoch's samples, without those of skipped steps; NaN if all were skipped.
        metrics: means of what the loss function logged.
        validation: what evaluation on the validation set gave, if there is one.
        seconds: the duration of the epoch's training.
        samples_per_s: the throughput, in samples per second, of what was computed here.
        skipped: the number of its steps that updated nothing, since their loss or gradient was NaN or infinite.
    """

    epoch: int
    loss: float
    metrics: dict[str, float]
    validation: dict[str, float]
    seconds: float
    samples_per_s: float
    skipped: int = 0


@dataclass(slots=True)
class History:
    """The epochs that this process trained, in order."""

    epochs: list[EpochRecord] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The training loss of each epoch."""
        return [record.loss for record in self.epochs]

    @property
    def skipped(self) -> int:
        """The number of steps that updated nothing, since their loss or gradient was NaN or infinite."""
        return sum(record.skipped for record in self.epochs)

    def validation(self, name: str) -> list[float]:
        """Return a validation metric, for each epoch that has it."""
        return [record.validation[name] for record in self.epochs if name in record.validation]


# What the main worker shows while it trains: a bar in a terminal, plain lines elsewhere.

LINE_EVERY_S = 10.0
"""Seconds between plain lines within an epoch."""

DRAW_EVERY_S = 0.25
WIDTH = 10
"""Signs of a bar in the launcher's terminal, which may have 80 for all."""


class Display:
    """Shows epoch, loss, samples per second, workers and the time left; this one nothing."""

    def begin(self, epoch: int, epochs: int, steps: int, done: int = 0) -> None:
        """Begin an epoch, or go on in it. ``steps`` is 0 if their number is not known; ``done`` of them are over."""

    def step(self, loss: float, samples_per_s: float, workers: int) -> None:
        """Show a step that is done."""

    def end(self, record: EpochRecord | None = None) -> None:
        """End the epoch, which may have a record."""

    def close(self) -> None:
        """Give the terminal back."""


class CountedSteps(Display):
    """Counts the steps of an epoch, and how long they take."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._epoch = self._epochs = self._steps = self._done = self._skipped = 0
        self._begun = self._shown = clock()

    def begin(self, epoch: int, epochs: int, steps: int, done: int = 0) -> None:
        """Start counting."""
        self._epoch, self._epochs, self._steps = epoch, epochs, steps
        self._done = self._skipped = done
        self._begun = self._shown = self._clock()

    def _left_s(self, now: float) -> float:
        return (now - self._begun) / (self._done - self._skipped) * (self._steps - self._done)


class Lines(CountedSteps):
    """A line per epoch, and one every ten seconds in long epochs."""

    def __init__(self, output: TextIO | None = None) -> None:
        super().__init__()
        self._output = output or sys.stdout

    def step(self, loss: float, samples_per_s: float, workers: int) -> None:
        """Say something if it has been long."""
        self._done += 1
        now = self._clock()
        if now - self._shown >= LINE_EVERY_S and self._done < self._steps:
            self._shown = now
            self._print(
                f"epoch {self._epoch + 1}/{self._epochs} step {self._done}/{self._steps} "
                f"{figures(loss, samples_per_s, workers)}, {self._left_s(now):.0f} s left in this epoch"
            )

    def end(self, record: EpochRecord | None = None) -> None:
        """Print the epoch's line."""
        if record is not None:
            self._print(summary(record, self._epochs))

    def _print(self, line: str) -> None:
        print(line, file=self._output, flush=True)


class Bar(Display):
    """A rich progress bar per epoch, in a terminal; finished epochs stay as lines above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console or Console(),
            transient=True,
        )
        self._task: TaskID | None = None
        self._epochs = 0

    def begin(self, epoch: int, epochs: int, steps: int, done: int = 0) -> None:
        """Begin a new bar."""
        self.end()
        self._epochs = epochs
        self._progress.start()
        words = f"epoch {epoch + 1}/{epochs}"
        self._task = self._progress.add_task(words, total=steps or None, completed=done, figures="")

    def step(self, loss: float, samples_per_s: float, workers: int) -> None:
        """Show the step."""
        if self._task is not None:
            self._progress.update(self._task, advance=1, figures=figures(loss, samples_per_s, workers))

    def end(self, record: EpochRecord | None = None) -> None:
        """Replace the bar by a line."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        if record is not None:
            self._progress.console.print(summary(record, self._epochs), highlight=False)

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


class TextBar(CountedSteps):
    """A bar of text.

    Args:
        draw: a function that shows a text in the place of the one before; empty where the bar is over.
        write: a function that writes a line that stays.
    """

    def __init__(
        self, draw: Callable[[str], object], write: Callable[[str], object], clock: Callable[[], float] = perf_counter
    ) -> None:
        super().__init__(clock)
        self._show, self._print = draw, write

    def begin(self, epoch: int, epochs: int, steps: int, done: int = 0) -> None:
        """Begin a new bar."""
        super().begin(epoch, epochs, steps, done)
        self._draw("")

    def step(self, loss: float, samples_per_s: float, workers: int) -> None:
        """Note the step; the bar is drawn a few times a second."""
        self._done += 1
        now = self._clock()
        if now - self._shown < DRAW_EVERY_S and self._done != self._steps:
            return
        words = f" {timedelta(seconds=round(self._left_s(now)))} left" if self._steps else ""
        self._draw(f" {figures(loss, samples_per_s, workers)}{words}")

    def end(self, record: EpochRecord | None = None) -> None:
        """Replace the bar by a line."""
        if record is not None:
            self._show("")
            self._print(summary(record, self._epochs))

    def close(self) -> None:
        """Remove the bar."""
        self._show("")

    def _draw(self, words: str) -> None:
        self._shown = self._clock()
        filled = WIDTH * self._done // self._steps if self._steps else 0
        bar = "━" * min(filled, WIDTH) + "╌" * (WIDTH - filled)
        place = f"epoch {self._epoch + 1}/{self._epochs}"
        self._show(f"{place} {bar} {self._done}/{self._steps or '?'}{words}")


def launcher_bar(write: Callable[[str], object], clock: Callable[[], float] = perf_counter) -> TextBar:
    """A bar for the terminal of the launcher, which draws it below the lines of all workers, and into no log."""
    return TextBar(lambda text: write(as_line(text)), lambda line: write(f"{line}\n"), clock)


def cell_bar(display: Callable[..., Any], clock: Callable[[], float] = perf_counter) -> TextBar:
    """A bar in the output of a notebook's cell, where its last state stays. Rich's would need ipywidgets.

    ``display`` is IPython's.
    """
    handles: list[Any] = []

    def draw(text: str) -> None:
        if not text:
            return
        shown = {"text/plain": text}
        if handles:
            handles[0].update(shown, raw=True)
        else:
            handles.append(display(shown, raw=True, display_id=True))

    return TextBar(draw, print, clock)


class OfMainWorker(Display):
    """The display of the main worker. When that worker is lost, the new main worker continues the display."""

    def __init__(self, is_main: Callable[[], bool], make: Callable[[], Display]) -> None:
        self._is_main, self._make = is_main, make
        self._shown: Display | None = None
        self._place = (0, 0, 0, 0)

    def begin(self, epoch: int, epochs: int, steps: int, done: int = 0) -> None:
        """On the main worker."""
        self._place = (epoch, epochs, steps, done)
        if self._shown is None:
            self._now()
        else:
            self._shown.begin(*self._place)

    def step(self, loss: float, samples_per_s: float, workers: int) -> None:
        """On the main worker."""
        self._now().step(loss, samples_per_s, workers)
        *where, done = self._place
        self._place = (where[0], where[1], where[2], done + 1)

    def end(self, record: EpochRecord | None = None) -> None:
        """On the main worker."""
        self._now().end(record)

    def close(self) -> None:
        """Remove the display."""
        if self._shown is not None:
            self._shown.close()

    def _now(self) -> Display:
        if self._shown is None and self._is_main():
            self._shown = self._make()
            self._shown.begin(*self._place)
        return self._shown or Display()


def summary(record: EpochRecord, epochs: int) -> str:
    """Return a line about an epoch."""
    named = {"loss": record.loss, **record.metrics, **record.validation}
    listed = " ".join(f"{name} {value:.4f}" for name, value in named.items())
    skipped = f", {record.skipped} step{'s'[: record.skipped != 1]} skipped" if record.skipped else ""
    rate = f"{record.samples_per_s:.0f} samples/s {record.seconds:.1f} s"
    return f"epoch {record.epoch + 1}/{epochs} {listed} {rate}{skipped}"


def figures(loss: float, samples_per_s: float, workers: int) -> str:
    """Describe a step in words."""
    return f"loss {loss:.4f} {samples_per_s:.0f} samples/s {workers} worker{'' if workers == 1 else 's'}"


def display_of(is_main: Callable[[], bool], elsewhere: Callable[[], Display]) -> Display:
    """Return the display of the main worker: a bar in a terminal, a notebook, or the terminal of its launcher."""

    def make() -> Display:
        if Console().is_jupyter:
            from IPython.display import display

            return cell_bar(display)
        if sys.stdout.isatty():
            return Bar()
        if os.environ.get(VARIABLE) == "1":
            return launcher_bar(partial(print, end="", flush=True))
        return elsewhere()

    return OfMainWorker(is_main, make)


def with_display(
    steps: Iterable[Step], display: Display, place: Callable[[Step], tuple[int, int, int]], workers: Callable[[], int]
) -> Generator[Step, None, None]:
    """Yield the steps, and show each step when its body is done.

    ``place`` says of a step how many epochs there are, how many steps its epoch has, and how many of these are over.
    ``display`` is closed with the loop.
    """
    epoch, samples, begun = -1, 0, perf_counter()
    with closing(display):
        for step in steps:
            if step.epoch != epoch:
                epoch, samples, begun = step.epoch, 0, perf_counter()
                display.begin(epoch, *place(step))
            yield step
            samples += step.size
            display.step(step.loss, samples / max(perf_counter() - begun, 1e-9), workers())
