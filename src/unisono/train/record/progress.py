"""The progress display of the main worker: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import perf_counter
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

# What ``fit`` returns: one record per epoch.


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch.

    Attributes:
        epoch: the number of the epoch, from 0.
        loss: the mean training loss over the epoch's samples.
        metrics: means of what the loss function logged.
        validation: what evaluation on the validation set gave, if there is one.
        seconds: the duration of the epoch's training.
        samples_per_s: the throughput, in samples per second.
    """

    epoch: int
    loss: float
    metrics: dict[str, float]
    validation: dict[str, float]
    seconds: float
    samples_per_s: float


@dataclass(slots=True)
class History:
    """The epochs that this process trained, in order."""

    epochs: list[EpochRecord] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The training loss of each epoch."""
        return [record.loss for record in self.epochs]

    def validation(self, name: str) -> list[float]:
        """One validation metric, for each epoch that has it."""
        return [record.validation[name] for record in self.epochs if name in record.validation]


# What the main worker shows while it trains: a bar in a terminal, plain lines elsewhere.

LINE_EVERY_S = 10.0
"""Seconds between plain lines within an epoch."""


class Display:
    """Shows epoch, loss, samples per second and the time left; this one nothing, for all workers but the main one."""

    def begin(self, epoch: int, epochs: int, steps: int) -> None:
        """An epoch of so many steps begins."""

    def step(self, loss: float, samples_per_s: float) -> None:
        """A step is done."""

    def end(self, record: EpochRecord) -> None:
        """The epoch is done."""

    def close(self) -> None:
        """Give the terminal back."""


class Lines(Display):
    """A line per epoch, and one every ten seconds in long epochs."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._epoch = self._epochs = self._steps = self._done = 0
        self._begun = self._said = perf_counter()

    def begin(self, epoch: int, epochs: int, steps: int) -> None:
        """Start counting."""
        self._epoch, self._epochs, self._steps, self._done = epoch, epochs, steps, 0
        self._begun = self._said = perf_counter()

    def step(self, loss: float, samples_per_s: float) -> None:
        """Say something if it has been long."""
        self._done += 1
        now = perf_counter()
        if now - self._said >= LINE_EVERY_S and self._done < self._steps:
            self._said = now
            left = (now - self._begun) / self._done * (self._steps - self._done)
            self._say(
                f"epoch {self._epoch + 1}/{self._epochs} step {self._done}/{self._steps} loss {loss:.4f} "
                f"{samples_per_s:.0f} samples/s, {left:.0f} s left in this epoch"
            )

    def end(self, record: EpochRecord) -> None:
        """The epoch's line."""
        self._say(summary(record, self._epochs))

    def _say(self, line: str) -> None:
        print(line, file=self._output, flush=True)


class Bar(Display):
    """A rich progress bar per epoch; finished epochs stay as lines above it."""

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

    def begin(self, epoch: int, epochs: int, steps: int) -> None:
        """A new bar."""
        self._epochs = epochs
        self._progress.start()
        self._task = self._progress.add_task(f"epoch {epoch + 1}/{epochs}", total=steps, figures="")

    def step(self, loss: float, samples_per_s: float) -> None:
        """Advance."""
        if self._task is not None:
            figures = f"loss {loss:.4f} {samples_per_s:.0f} samples/s"
            self._progress.update(self._task, advance=1, figures=figures)

    def end(self, record: EpochRecord) -> None:
        """The bar becomes a line."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self._progress.console.print(summary(record, self._epochs), highlight=False)

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


def summary(record: EpochRecord, epochs: int) -> str:
    """One line about an epoch."""
    figures = {"loss": record.loss, **record.metrics, **record.validation}
    listed = " ".join(f"{name} {value:.4f}" for name, value in figures.items())
    return f"epoch {record.epoch + 1}/{epochs} {listed} {record.samples_per_s:.0f} samples/s {record.seconds:.1f} s"


def choose_display(*, is_main: bool, progress: bool) -> Display:
    """A bar in a terminal, lines elsewhere, nothing on the other workers."""
    if not is_main or not progress:
        return Display()
    return Bar() if sys.stdout.isatty() else Lines()
