"""The line of ``metrics.jsonl`` about the step that is under way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter, time
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from unisono.adapt.curvature_question import CONFIDENCE, FIGURES
from unisono.checkpoint.folder import RunFolder
from unisono.data.order import Order
from unisono.device import HostRead, is_accelerator
from unisono.errors import JobError
from unisono.plan.batches import Batches
from unisono.received import short
from unisono.train.group.membership import Membership
from unisono.train.state.monitors import NAMES
from unisono.train.state.trained import Doubt, Trained
from unisono.train.step.listeners import Computed, Listener
from unisono.train.step.step import Step


def round_figures(told: Sequence[Mapping[str, Any]], strategy: str) -> tuple[float, dict[str, Any]]:
    """What a round came to.

    Args:
        told: what each worker says that has computed a sample in the round.
        strategy: the strategy's text, such as ``local-sgd:every=16``.

    Returns:
        the mean loss of a sample, and the further fields of the round's line.
    """
    samples = sum(one["samples"] for one in told)
    seconds = max(one["seconds"] for one in told)
    names = dict.fromkeys(name for one in told for name in one["metrics"])
    means = {name: sum(one["metrics"].get(name, 0.0) for one in told) / samples for name in names}
    by_worker = {
        name: [one.get(name) for one in told] for name in ("samples", "updates", "staleness", "exchanges", "sent")
    }
    known = {name: values for name, values in by_worker.items() if any(value is not None for value in values)}
    about = {
        "strategy": strategy,
        "round": {"steps": max(one["steps"] for one in told), "seconds": seconds, **known},
        "samples_per_s": round(samples / seconds, 3),
    }
    return sum(one["loss"] for one in told) / samples, {**means, **about}


# What the main worker writes down about each step.

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
        self.write({"samples_per_s": round(rate, 3), **line, "seconds": seconds})
        self._newest = self.latest
        self.next_step()

    def next_step(self) -> None:
        """Start the clock of the next step."""
        self._started = perf_counter()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line, with the time of the first time that it is written."""
        self.latest = {"time": round(time(), 3), **line}
        if self.writes:
            self._folder.metrics.write(self.latest)


RESERVED = frozenset(
    (
        *("step", "epoch", "position", "loss", "losses", "lr", "generation", "world_size", "seconds", "samples_per_s"),
        *("batch_size", "shards", "ends_epoch", "learning_rate", "lr_factor", "workers", "links", "setting"),
        *("norms", "strategy", "round", "time", "shard_s"),
        *NAMES,
        *FIGURES,
    )
)
"""What lines of ``metrics.jsonl`` have."""


class MetricsLine(Listener):
    """Gathers what there is to say of a step, and writes it down when the step ends.

    Args:
        folder: the run folder.
        trained: the state of the run.
        membership: the members of the job, of which the main worker writes.
    """

    def __init__(self, folder: RunFolder, trained: Trained, membership: Membership) -> None:
        self._folder, self._trained, self._membership = folder, trained, membership
        self._recorder, self._line = Recorder(folder, writes=membership.is_main), dict[str, Any]()
        self._seconds: Mapping[str, float] = {}

    @property
    def latest(self) -> Mapping[str, Any]:
        """The newest line."""
        return self._recorder.latest

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
        self._recorder.write({"step": self._trained.progress.position.step, name: value})

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """The clock of the first step begins to run."""
        self._recorder.next_step()

    def step_begins(self, step: Step) -> None:
        """The samples are here."""
        self._recorder.step_loaded()
        self._line = {"step": step.number, "epoch": step.epoch, "position": step.position, "batch_size": step.size}
        if step.is_last_in_epoch:
            self._line["ends_epoch"] = True
        if not self._trained.policy_state.is_empty:
            self._line["shards"] = step.batch.shards

    def call_done(self, step: Step, optimizers: Sequence[Optimizer], done: Computed) -> None:
        """A call of ``step.run`` is over."""
        self._seconds = done.seconds
        if done.samples:
            self._note(optimizers, done.loss, {**done.metrics, **done.figures})
        self._recorder.step_ran()

    def round_ended(self, told: Sequence[Mapping[str, Any]], strategy: str) -> None:
        """All workers have the same weights again: the line tells what they came to."""
        if not self._line or self._trained.prepared is None:
            return
        loss, about = round_figures(told, strategy)
        times = {} if self._trained.policy_state.is_empty else self._trained.monitors.times
        self._line.pop("loss", None)  # that of this worker's part of the newest step
        self._note(self._trained.prepared.optimizers, loss, {**about, **times})

    def links_measured(self, links: Mapping[str, Any]) -> None:
        """The line tells of them."""
        self._line["links"] = dict(links)

    def finish(self, step: Step, rates: Mapping[str, float]) -> None:
        """The step is committed: write the line, if there is one.

        Args:
            step: the finished step.
            rates: learning rates by name, where policies may change them.
        """
        if self.is_computed:
            self._recorder.step_ends(self._line | dict(rates), step.size)

    def renewed(self) -> None:
        """Whoever is the main worker now writes what the one before has not."""
        if self._membership.is_main:
            self._recorder.take_over()

    def went_back(self, reached: int, step: int, doubt: Doubt) -> None:
        """Steps are computed again, and have lines again."""
        self._recorder.go_back()
        if self._membership.is_main:
            self._folder.metrics.truncate_after(step - 1)

    def _note(self, optimizers: Sequence[Optimizer], loss: float, metrics: Mapping[str, Any]) -> None:
        line, workers, seconds = self._line, self._membership.workers, dict(self._seconds)
        if self.is_computed:
            line.setdefault("losses", [line["loss"]]).append(loss)
            seconds = {name: value + line["seconds"].get(name, 0.0) for name, value in seconds.items()}
        else:  # the rate of the first call is kept
            line |= {"loss": loss, "lr": float(optimizers[0].param_groups[0].get("lr", math.nan))}
        about = {"generation": workers.generation.number, "world_size": workers.world_size, **metrics}
        line |= {"seconds": seconds, **about}


def metric(name: Any, value: Any) -> float | HostRead:
    """The value of a metric that a script logs; of a device, for which nobody waits yet.

    Raises:
        JobError: lines have something else by this name, or it is no number.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise JobError(f"run.log({short(name)}, …): needs a name, as text without control characters")
    if name in RESERVED or name.startswith(CONFIDENCE):
        raise JobError(f"run.log({short(name)}): metrics.jsonl uses this name for itself; choose another")
    try:
        if isinstance(value, Tensor) and is_accelerator(value.device) and value.numel() == 1 and not value.is_complex():
            return HostRead(value)
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise JobError(
            f"run.log({short(name)}, {short(value)}): needs a number, or a tensor with one element"
        ) from None
