"""Lightning's loggers: where they write is agreed on, and whoever is the main worker goes on with their files."""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from unisono.integrations.lightning.framework import fabric
from unisono.received import read_object, value_of
from unisono.train.run import Run

_CSVLogger = fabric("loggers.csv_logs").CSVLogger

VERSIONS = "lightning.json"
"""The file of the run folder that has the versions of loggers, in the order in which they were asked for."""

RECENT = 1000
"""Rows that every worker keeps, since a main worker may be lost before it has written them."""

_asked: WeakKeyDictionary[Run, int] = WeakKeyDictionary()


def agree_on_versions(run: Run, loggers: Sequence[Any]) -> None:
    """Have loggers that number their folders take the same number on all workers, and when the job is resumed."""
    for logger in loggers:
        if getattr(logger, "_version", "") is None:
            number = _asked.get(run, 0)
            _asked[run] = number + 1
            logger._version = run.together(partial(_version, run, logger, number))


def _version(run: Run, logger: Any, number: int, workers: Any) -> Any:
    found = None
    if workers.rank == 0:
        path = run.dir / VERSIONS
        known: list[int | str] = []
        if path.is_file():
            known = value_of(list[int | str], read_object(path).get("versions"), f"versions in {path}")
        if number >= len(known):
            known.append(logger.version)
            logger._version = None
            path.write_text(json.dumps({"versions": known}))
        found = known[number]
    return workers.broadcast(found)


class Rows:
    """The rows of a ``CSVLogger``: counted on every worker, so that whoever becomes the main one goes on with them.

    Args:
        logger: the logger, before it has made its writer, which deletes an older file.
        run: the run.

    Attributes:
        count: the number of rows so far.
    """

    def __init__(self, logger: Any, run: Run) -> None:
        self.count = 0
        self._logger, self._run = logger, run
        self._write = logger.log_metrics
        self._found: list[list[str]] | None = self._read() if run.is_main else None
        self._recent: deque[tuple[dict[str, Any], int | None]] = deque(maxlen=RECENT)
        vars(logger)["log_metrics"] = self._log

    def close(self) -> None:
        """Give the logger back as it was."""
        vars(self._logger).pop("log_metrics", None)

    def settle(self) -> None:
        """Have all rows in the file."""
        if self._run.is_main:
            self._logger.save()

    def begin(self) -> None:
        """The training has begun, or goes on: an older file counts no more."""
        self._found = None

    def resume(self, count: int) -> None:
        """The run goes on behind so many rows."""
        self.count = count
        if self._run.is_main:
            if self._found is None:
                self.settle()
            self._restore(self._read() if self._found is None else self._found)

    def _log(self, metrics: Any, step: int | None = None) -> None:
        if self._run.is_main and self._logger._experiment is None and self.count:
            self._restore(self._read())
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        self._recent.append((numbers, step))
        self._write(numbers, step)
        self.count += 1

    def _restore(self, rows: list[list[str]]) -> None:
        """Have the file end behind the rows that count."""
        experiment = self._logger.experiment
        experiment.metrics, experiment.metrics_keys = [], rows[0] if rows else []
        if rows:
            with self._path.open("w", newline="") as file:
                csv.writer(file).writerows(rows[: 1 + self.count])
        missing = self.count - max(0, len(rows) - 1)
        for metrics, step in list(self._recent)[-missing:] if missing > 0 else ():
            self._write(metrics, step)  # the main worker before this one was lost with them

    def _read(self) -> list[list[str]]:
        if not self._path.is_file():
            return []
        with self._path.open(newline="") as file:
            return list(csv.reader(file))

    @property
    def _path(self) -> Path:
        return Path(self._logger.log_dir) / "metrics.csv"


def rows_of(run: Run, loggers: Sequence[Any]) -> list[Rows]:
    """The rows of all loggers that write CSV files."""
    return [Rows(one, run) for one in loggers if isinstance(one, _CSVLogger)]
