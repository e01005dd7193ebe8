"""The line of ``metrics.jsonl`` about the step that is under way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter, time
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from unisono.adapt.norms import CONFIDENCE, FIGURES
from unisono.checkpoint.folder import RunFolder
from unisono.data.sample_order import Order
from unisono.device import HostRead, is_accelerator
from unisono.errors import JobError
from unisono.plan.batches import Batches
from unisono.received import short
from unisono.train.group.membership import Membership
from unisono.train.state.trained import NAMES, Doubt, Trained
from unisono.train.step.listeners import Computed, Listener
from unisono.train.step.step import Step


def round_figures(reports: Sequence[Mapping[str, Any]], strategy: str) -> tuple[float, dict[str, Any]]:
    """Return the mean loss of a sample in a round, and the further fields of the round's line."""
    samples = sum(worker["samples"] for worker in reports)
    seconds = max(worker["seconds"] for worker in reports)
    names = dict.fromkeys(name for worker in reports for name in worker["metrics"])
    means = {name: sum(worker["metrics"].get(name, 0.0) for worker in reports) / samples for name in names}
    by_worker = {
        name: [worker.get(name) for worker in reports]
        for name in ("samples", "updates", "staleness", "exchanges", "sent")
    }
    known = {name: values for name, values in by_worker.items() if any(value is not None for value in values)}
    about = {
        "strategy": strategy,
        "round": {"steps": max(worker["steps"] for worker in reports), "seconds": seconds, **known},
        "samples_per_s": round(samples / seconds, 3),
    }
    return sum(worker["loss"] for worker in reports) / samples, {**means, **about}


SEARCHED = 100
"""Lines at the end of the file among which a step's line is looked for; the script may have logged others behind it."""

RESERVED = frozenset(
    (
        *("step", "epoch", "position", "loss", "losses", "lr", "generation", "world_size", "seconds", "samples_per_s"),
        *("batch_size", "shards", "ends_epoch", "learning_rate", "lr_factor", "workers", "links", "setting"),
        *("norms", "strategy", "round", "time", "shard_s"),
        *NAMES,
        *FIGURES,
    )
)
"""The names of the fields in lines of ``metrics.jsonl``."""


class MetricsLine(Listener):
    """Gathers what there is to say of a step; the main worker writes it to ``metrics.jsonl`` when the step ends.

    All workers have the ``latest`` line, also those that write none.
    """

    def __init__(self, folder: RunFolder, trained: Trained, membership: Membership) -> None:
        self._folder, self._trained, self._membership = folder, trained, membership
        self._writes = membership.is_main
        self.latest: dict[str, Any] = {}
        self._newest: dict[str, Any] | None = None  # of a step that ended
        self._line: dict[str, Any] = {}
        self._seconds: Mapping[str, float] = {}
        self._started = self._loaded = self._ran = perf_counter()

    @property
    def newest_loss(self) -> float:
        """In the newest line; NaN if it has none."""
        return float(self.latest.get("loss", math.nan))

    @property
    def is_computed(self) -> bool:
        """Whether something of the step was computed, so that it has a line."""
        return "loss" in self._line

    def write(self, name: str, value: float) -> None:
        """Write a line that the script logs, between two steps or beside one."""
        self._write({"step": self._trained.progress.position.step, name: value})

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """Start the clock of the first step."""
        self._started = perf_counter()

    def step_begins(self, step: Step) -> None:
        """Note that the samples are here. The step's clock has run since the step before was over."""
        self._loaded = self._ran = perf_counter()
        self._line = {"step": step.number, "epoch": step.epoch, "position": step.position, "batch_size": step.size}
        if step.is_last_in_epoch:
            self._line["ends_epoch"] = True
        if not self._trained.policy_state.is_empty:
            self._line["shards"] = step.batch.shards

    def call_done(self, step: Step, optimizers: Sequence[Optimizer], done: Computed) -> None:
        """Note the end of a call of ``step.run``: the rest of the loop's body does not count as the step's time."""
        self._seconds = done.seconds
        if done.samples:
            figures = {name: _plain(name, value) for name, value in done.figures.items()}
            self._note(optimizers, done.loss, {**done.metrics, **figures, **step.curvature})
        self._ran = perf_counter()

    def round_ended(self, reports: Sequence[Mapping[str, Any]], strategy: str) -> None:
        """Write the figures of a round into the line: all workers have the same weights again."""
        if not self._line or self._trained.prepared is None:
            return
        loss, about = round_figures(reports, strategy)
        times = {} if self._trained.policy_state.is_empty else self._trained.monitors.times
        self._line.pop("loss", None)  # that of this worker's part of the newest step
        self._note(self._trained.prepared.optimizers, loss, {**about, **times})

    def links_measured(self, links: Mapping[str, Any]) -> None:
        """Write the measured connections into the line."""
        self._line["links"] = dict(links)

    def finish(self, step: Step, rates: Mapping[str, float]) -> None:
        """Write the line of a committed step, if there is one.

        ``rates`` are learning rates by name, where policies may change them.
        """
        if not self.is_computed:
            return
        total = self._ran - self._started
        seconds = {"data": self._loaded - self._started, **self._line["seconds"], "total": total}
        rate = step.size / total if total > 0 else 0.0  # where the line has none of its own
        self._write({"samples_per_s": round(rate, 3), **self._line, **rates, "seconds": seconds})
        self._newest = self.latest
        self._started = perf_counter()

    def renewed(self) -> None:
        """On a new main worker, write the lines of its steps that the main worker before has not written."""
        if self._writes or not self._membership.is_main:
            return
        self._writes = True
        if self._newest is not None:
            step = self._newest["step"]
            lines = self._folder.metrics.truncate_after(step)
            if not any(line.get("step") == step and "loss" in line for line in lines[-SEARCHED:]):
                self._write(self._newest)

    def went_back(self, reached: int, step: int, doubt: Doubt) -> None:
        """Remove the lines of steps that are computed again: a new main worker must not write the old lines."""
        self._newest = None
        self._started = perf_counter()
        if self._membership.is_main:
            self._folder.metrics.truncate_after(step - 1)

    def _write(self, line: Mapping[str, Any]) -> None:
        self.latest = {"time": round(time(), 3), **line}  # the time of the first time that it is written
        if self._writes:
            self._folder.metrics.write(self.latest)

    def _note(self, optimizers: Sequence[Optimizer], loss: float, metrics: Mapping[str, Any]) -> None:
        line, workers, seconds = self._line, self._membership.workers, dict(self._seconds)
        if self.is_computed:
            line.setdefault("losses", [line["loss"]]).append(loss)
            seconds = {name: value + line["seconds"].get(name, 0.0) for name, value in seconds.items()}
        else:  # the rate of the first call is kept
            line |= {"loss": loss, "lr": float(optimizers[0].param_groups[0].get("lr", math.nan))}
        about = {"generation": workers.generation.number, "world_size": workers.world_size, **metrics}
        line |= {"seconds": seconds, **about}


def _plain(name: str, value: Any) -> Any:
    """A figure as JSON has it.

    Raises:
        JobError: it is a tensor with several elements.
    """
    return float(_number(name, value, "attempt.figures")) if isinstance(value, Tensor | np.generic) else value


def require_free_name(name: Any, where: str) -> None:
    """Refuse a name that cannot be that of a figure of the script.

    Raises:
        JobError: lines have something else by this name, or it is none.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise JobError(f"{where}({short(name)}, …): needs a name, as text without control characters")
    if name in RESERVED or name.startswith(CONFIDENCE):
        raise JobError(f"{where}({short(name)}): metrics.jsonl uses this name for itself; choose another")


def metric(name: Any, value: Any) -> float | HostRead:
    """The value of a metric that a script logs; of a device, for which nobody waits yet.

    Raises:
        JobError: lines have something else by this name, or it is no number.
    """
    require_free_name(name, "run.log")
    return _number(name, value, "run.log")


def _number(name: Any, value: Any, where: str) -> float | HostRead:
    try:
        if isinstance(value, Tensor) and is_accelerator(value.device) and value.numel() == 1 and not value.is_complex():
            return HostRead(value)
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise JobError(
            f"{where}({short(name)}, {short(value)}): needs a number, or a tensor with one element"
        ) from None
