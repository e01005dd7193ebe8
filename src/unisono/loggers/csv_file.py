"""Figures as a table: ``metrics.csv`` in the run folder, a row per step."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final, TypedDict

from unisono.loggers.logger import LoggedRun, Logger


class _Text(TypedDict):
    encoding: str
    errors: str


TEXT: Final[_Text] = {"encoding": "utf-8", "errors": "backslashreplace"}
"""How the file is written, whatever names a script gives its figures: halves of characters, too."""


class CSVLogger(Logger):
    """Writes a row per step, and a column per figure. A figure that is new gets a column of its own, on the right.

    Args:
        file: the file's name in the run folder.
    """

    def __init__(self, file: str = "metrics.csv") -> None:
        self._name = file
        self._path = Path()
        self._columns: list[str] = []
        self._file: IO[str] | None = None

    @property
    def name(self) -> str:
        """The file's name."""
        return self._name

    def open(self, run: LoggedRun) -> int:
        """Keep the rows of committed steps, and go on behind them."""
        self._path = run.folder / self._name
        rows = [] if run.steps == 0 else self._rows()
        kept = [row for row in rows if int(row["step"]) < run.steps]
        self._columns = list(rows[0]) if rows else ["step"]
        self._rewrite(kept)
        return int(kept[-1]["step"]) + 1 if kept else 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row, whole or not at all."""
        if new := [name for name in values if name not in self._columns]:
            rows = self._rows()
            self._columns += new
            self._rewrite(rows)
        assert self._file is not None, "it is open"
        row = io.StringIO()
        csv.DictWriter(row, self._columns, lineterminator="\n").writerow({**values, "step": step})
        self._file.write(row.getvalue())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rows(self) -> list[dict[str, str]]:
        """The whole rows of the file, each with all columns; a torn last one is left out."""
        if not self._path.is_file():
            return []
        text, _, _ = self._path.read_text(**TEXT).rpartition("\n")
        return [row for row in csv.DictReader(io.StringIO(text)) if (row.get("step") or "").isdecimal()]

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.close()
        beside = self._path.with_name(f".{self._name}.new")
        with beside.open("w", newline="", **TEXT) as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        beside.replace(self._path)
        self._file = self._path.open("a", newline="", **TEXT)
