"""What the main worker writes down about each step."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from unisono.checkpoint.folder import RunFolder

SEARCHED = 100
"""Lines at the end of the file among which a step's line is looked for; the script may have logged others behind it."""


class Recorder:
    """Writes ``metrics.jsonl``: a line per step.

    Attributes:
        latest: the newest line.
        writes: whether this is the worker that writes; the others only keep the newest line.
    """

    def __init__(self, folder: RunFolder, *, writes: bool) -> None:
        self.latest: dict[str, Any] = {}
        self.writes = writes
        self._folder = folder
        self._newest: dict[str, Any] | None = None
        self._started = self._loaded = self._ran = perf_counter()

    def take_over(self) -> None:
        """This is the main worker now: what the one before it has not written of this worker's steps is written."""
        if self.writes:
            return
        self.writes = True
        if self._newest is not None:
            step = self._newest["step"]
            lines = self._folder.metrics.truncate_after(step)
            if not any(line.get("step") == step and "loss" in line for line in lines[-SEARCHED:]):
                self.write(self._newest)

    def go_back(self) -> None:
        """Steps are computed again: their lines are not to be written by whoever takes over."""
        self._newest = None
        self.next_step()

    def step_loaded(self) -> None:
        """The step's samples are here. Its clock has run since the step before was over."""
        self._loaded = self._ran = perf_counter()

    def step_ran(self) -> None:
        """A call of ``step.run`` is done; what else the loop's body does is not the step's time."""
        self._ran = perf_counter()

    def step_ends(self, line: Mapping[str, Any], samples: int) -> None:
        """Write the line of a step, with its duration in seconds and, unless it has it, its samples per second."""
        total = self._ran - self._started
        seconds = {"data": self._loaded - self._started, **line["seconds"], "total": total}
        rate = samples / total if total > 0 else 0.0
        self._newest = {"samples_per_s": round(rate, 3), **line, "seconds": seconds}
        self.write(self._newest)
        self.next_step()

    def next_step(self) -> None:
        """Start the clock of the next step."""
        self._started = perf_counter()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        self.latest = dict(line)
        if self.writes:
            self._folder.metrics.write(self.latest)
