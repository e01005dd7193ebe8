"""The values that ``self.log`` logs of shards and of evaluated batches, and how all workers get them."""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from unisono.errors import LossError
from unisono.integrations.kit import refused
from unisono.integrations.lightning.framework import fabric, part
from unisono.received import read_object, value_of
from unisono.train.run import Run

_Results = part("trainer.connectors.logger_connector.result")._ResultCollection

_Misconfiguration: Any = fabric("utilities.exceptions").MisconfigurationException

PREFIX = "lightning "
"""The prefix of the names of logged values in a run's metrics."""

MEANS = ("mean", "avg", torch.mean)
SUMS = ("sum", torch.sum, sum)
EXTREMES = {"min": "min", torch.min: "min", min: "min", "max": "max", torch.max: "max", max: "max"}


@dataclass(frozen=True, slots=True)
class LogKind:
    """The arguments of a call of ``self.log`` besides the value, as plain values.

    Attributes:
        fx: the hook that called.
        attribute: the attribute of the module that holds the torchmetrics metric; empty for a number.
        reduce: the way in which values of several steps become one: mean, sum, min or max.
        has_size: whether the caller said how many samples it is the mean of.
        dtype: the type of the number: float32 or float64.
    """

    fx: str
    name: str
    attribute: str = ""
    prog_bar: bool = False
    logger: bool = True
    on_step: bool = False
    on_epoch: bool = True
    reduce: str = "mean"
    has_size: bool = False
    add_dataloader_idx: bool = True
    dtype: str = "float32"


FLAGS = {"prog_bar": False, "logger": True, "on_step": False, "on_epoch": True, "add_dataloader_idx": True}
"""The arguments of ``self.log`` that are passed on as they are, with their defaults."""


@dataclass(frozen=True, slots=True)
class LogCall:
    """A call of ``self.log``. ``value`` is None for a metric."""

    kind: LogKind
    value: float | None
    batch_size: int | None


class RecordedLogs(_Results):  # type: ignore[misc,valid-type]  # Lightning is not looked into by mypy
    """Records the calls of ``self.log`` in the place of a loop's results, instead of adding the values up."""

    def __init__(self) -> None:
        super().__init__(training=True)
        self.calls: list[LogCall] = []

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Note a call.

        Raises:
            LossError: values cannot be combined in the way that is asked for.
        """
        flags: dict[str, Any] = {flag: bool(options.get(flag, usual)) for flag, usual in FLAGS.items()}
        if not isinstance(value, Tensor):
            kind = LogKind(fx, name, str(options.get("metric_attribute") or ""), **flags)
            self._note(LogCall(kind, None, options.get("batch_size")))
            return
        reduce = options.get("reduce_fx", torch.mean)
        reduce = reduce.lower() if isinstance(reduce, str) else reduce
        if reduce not in (*MEANS, *SUMS, *EXTREMES):
            raise LossError(refused("lightning.reduce-fx", name=name, reduce_fx=options["reduce_fx"]))
        kind = LogKind(
            fx,
            name,
            reduce="sum" if reduce in SUMS else EXTREMES.get(reduce, "mean"),
            has_size=options.get("batch_size") is not None,
            dtype="float64" if value.dtype == torch.float64 else "float32",
            **flags,
        )
        self._note(LogCall(kind, float(value.detach()), options.get("batch_size")))

    def _note(self, noted: LogCall) -> None:
        """Note a call, unless one has logged the same name in another way: Lightning refuses that in these words."""
        new = noted.kind
        for kind in (call.kind for call in self.calls if (call.kind.fx, call.kind.name) == (new.fx, new.name)):
            if replace(kind, has_size=new.has_size, dtype=new.dtype) != new:
                raise _Misconfiguration(
                    f"You called `self.log({new.name}, ...)` twice in `{new.fx}` with different arguments. This is not "
                    f"allowed"
                )
        self.calls.append(noted)


@contextmanager
def recording(trainer: Any, loop: Any) -> Iterator[RecordedLogs]:
    """Record the calls of ``self.log`` in the context; Lightning's own results stay as they are."""
    connector, kept, recorded = trainer._logger_connector, loop._results, RecordedLogs()
    fx = connector._current_fx
    loop._results = recorded
    try:
        yield recorded
    finally:
        loop._results, connector._current_fx = kept, fx


def log_result(trainer: Any, kind: LogKind, value: Any, batch_size: int) -> None:
    """Log a value where Lightning keeps results, as ``self.log`` does.

    ``batch_size`` is the number of samples that a number is the mean of.
    """
    connector, results = trainer._logger_connector, trainer._results
    if connector.should_reset_tensors(kind.fx):  # the first batch of an epoch
        results.reset(metrics=False, fx=kind.fx)
    connector._current_fx = kind.fx
    if not kind.attribute:
        value = torch.tensor(value, dtype=getattr(torch, kind.dtype), device=trainer.strategy.root_device)
    add(trainer, results, kind, value, batch_size)


def add(trainer: Any, results: Any, kind: LogKind, value: Any, batch_size: int) -> None:
    """Add a tensor or a metric to a collection of results."""
    metas = [known.meta for known in results.values()]
    same = [meta.reduce_fx for meta in metas if (meta.fx, meta.name) == (kind.fx, kind.name)]
    results.log(
        kind.fx,
        kind.name,
        value,
        **{flag: getattr(kind, flag) for flag in FLAGS},
        reduce_fx=next((fx for fx in same if fx.__name__ == kind.reduce), kind.reduce),  # min and torch.min are not one
        batch_size=batch_size,
        sync_dist_fn=trainer.strategy.reduce,  # as self.log does, or Lightning takes it for another call
        metric_attribute=kind.attribute or None,
    )


# Lightning's loggers: workers agree on where they write, and a new main worker goes on with their files.

_CSVLogger = fabric("loggers.csv_logs").CSVLogger

VERSIONS = "lightning.json"
"""The file of the run folder that has the versions of loggers, in the order in which they were asked for."""

RECENT = 1000
"""Rows that every worker keeps, since a main worker may be lost before it has written them."""

_numbers: WeakKeyDictionary[Run, int] = WeakKeyDictionary()


def agree_on_versions(run: Run, loggers: Sequence[Any]) -> None:
    """Have loggers that number their folders take the same number on all workers, and when the job is resumed."""
    for logger in loggers:
        if getattr(logger, "_version", "") is None:
            number = _numbers.get(run, 0)
            _numbers[run] = number + 1
            logger._version = run.together(partial(_version, run, logger, number))


def _version(run: Run, logger: Any, number: int, workers: Any) -> Any:
    version = None
    if workers.rank == 0:
        path = run.dir / VERSIONS
        known: list[int | str] = []
        if path.is_file():
            known = value_of(list[int | str], read_object(path).get("versions"), f"versions in {path}")
        if number >= len(known):
            known.append(logger.version)
            logger._version = None
            path.write_text(json.dumps({"versions": known}))
        version = known[number]
    return workers.broadcast(version)


class Rows:
    """The rows of a ``CSVLogger``: counted on every worker, so that a new main worker goes on with them.

    Args:
        logger: the logger, before it has made its writer, which deletes an older file.
    """

    def __init__(self, logger: Any, run: Run) -> None:
        self.count = 0
        self._logger, self._run = logger, run
        self._write = logger.log_metrics
        self._old_rows: list[list[str]] | None = self._read() if run.is_main else None
        self._recent: deque[tuple[dict[str, Any], int | None]] = deque(maxlen=RECENT)
        vars(logger)["log_metrics"] = self._log

    def close(self) -> None:
        """Give the logger back as it was."""
        vars(self._logger).pop("log_metrics", None)

    def settle(self) -> None:
        """Write all rows to the file."""
        if self._run.is_main:
            self._logger.save()

    def begin(self) -> None:
        """Note that the training has begun, or goes on: an older file counts no more."""
        self._old_rows = None

    def resume(self, count: int) -> None:
        """Go on behind so many rows."""
        self.count = count
        if self._run.is_main:
            if self._old_rows is None:
                self.settle()
            self._restore(self._read() if self._old_rows is None else self._old_rows)

    def _log(self, metrics: Any, step: int | None = None) -> None:
        if self._run.is_main and self._logger._experiment is None and self.count:
            self._restore(self._read())
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        self._recent.append((numbers, step))
        self._write(numbers, step)
        self.count += 1

    def _restore(self, rows: list[list[str]]) -> None:
        """Cut the file behind the rows that count, and write the missing ones."""
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
    return [Rows(logger, run) for logger in loggers if isinstance(logger, _CSVLogger)]
