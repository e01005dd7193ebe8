"""What the main worker writes down about each step."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from unisono.checkpoint.folder import RunFolder


class Recorder:
    """Writes ``metrics.jsonl``: a line per step. Without a folder (on the other workers) it only keeps the latest.

    Attributes:
        latest: the newest line.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self.latest: dict[str, Any] = {}
        self._folder = folder
        self._started = self._loaded = self._ran = perf_counter()

    def step_loaded(self) -> None:
        """The step's samples are here. Its clock has run since the step before was over."""
        self._loaded = self._ran = perf_counter()

    def step_ran(self) -> None:
        """A call of ``step.run`` is done; what else the loop's body does is not the step's time."""
        self._ran = perf_counter()

    def step_ends(self, line: Mapping[str, Any], samples: int) -> None:
        """Write the line of a step, with its duration in seconds and its throughput in samples per second."""
        total = self._ran - self._started
        seconds = {"data": self._loaded - self._started, **line["seconds"], "total": total}
        rate = samples / total if total > 0 else 0.0
        self.write({**line, "samples_per_s": round(rate, 3), "seconds": seconds})
        self.next_step()

    def next_step(self) -> None:
        """Start the clock of the next step."""
        self._started = perf_counter()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        self.latest = dict(line)
        if self._folder is not None:
            self._folder.metrics.write(self.latest)
