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
        self._started = perf_counter()

    def step_begins(self) -> None:
        """The clock of a step starts when the one before ends, so that loading is part of it."""
        self._started = perf_counter()

    def step_ends(self, line: Mapping[str, Any], samples: int) -> None:
        """Write the line of a step, with its duration in seconds and its throughput in samples per second."""
        seconds = perf_counter() - self._started
        rate = samples / seconds if seconds > 0 else 0.0
        self.write({**line, "samples_per_s": round(rate, 3), "seconds": {**line["seconds"], "total": seconds}})
        self._started = perf_counter()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        self.latest = dict(line)
        if self._folder is not None:
            self._folder.metrics.write(self.latest)
