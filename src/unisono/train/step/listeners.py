"""Listeners: objects that hear what happens in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch.optim import Optimizer

from unisono.data.sample_order import Order
from unisono.hooks import own_methods, together
from unisono.plan.audits import AuditResult
from unisono.plan.batches import Batches
from unisono.train.model.prepared import Prepared
from unisono.train.state.trained import Doubt
from unisono.train.step.step import Call, Step
from unisono.train.step.word import StepReport


@dataclass(frozen=True, slots=True)
class Counted:
    """An update that is made on this worker, and counted.

    Attributes:
        seconds: the seconds that it took, by part.
        skipped: the report of a call whose update was left out, since its loss or gradient is not finite.
        why: the loss or gradient that is not finite, in words; empty if the update is made.
    """

    generation: int
    seconds: Mapping[str, float]
    shards: int
    skipped: StepReport | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a call of ``step.run``.

    Attributes:
        seconds: the seconds of each part; empty if the result was taken from other workers.
        samples: the number of samples whose loss this worker knows; 0 for a result without a loss.
        is_skipped: whether nothing was updated.
    """

    loss: float
    metrics: Mapping[str, float]
    figures: Mapping[str, Any]
    seconds: Mapping[str, float]
    samples: int
    is_skipped: bool = False


class Listener:
    """Hears what happens on this worker, and changes nothing of the training. A subclass overrides what it needs."""

    def prepared(self, prepared: Prepared, step: int) -> None:
        """Called when all workers have these models, after so many steps."""

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """Called when a loop over a data set begins."""

    def step_begins(self, step: Step) -> None:
        """Called when a step's samples are loaded, before anything is computed."""

    def call_begins(self, call: Call, shards: Sequence[int], generation: int) -> None:
        """Called when this worker is about to compute these shards."""

    def step_computed(self, step: Step, shards: int, seconds: float) -> None:
        """Called when this worker has computed its shards in so many seconds, before they are added to the others'."""

    def call_worked_out(self, call: Call, shards: Sequence[int], report: StepReport) -> None:
        """Called when all workers have computed a call, before they work out its update together."""

    def call_counted(self, call: Call, counted: Counted) -> None:
        """Called when the call's update is made on this worker, and counted."""

    def part_skipped(self, step: int, why: str) -> None:
        """Called when this worker, which has weights of its own, makes no update from its part of a step."""

    def call_done(self, step: Step, optimizers: Sequence[Optimizer], done: Computed) -> None:
        """Called when a call of ``step.run`` is over."""

    def round_ended(self, reports: Sequence[Mapping[str, Any]], strategy: str) -> None:
        """Called when all workers have the same weights again, with what each did since the last time."""

    def links_measured(self, links: Mapping[str, Any]) -> None:
        """Called when the connections between workers were measured."""

    def topology_measured(self, about: Mapping[str, Any]) -> None:
        """Called when topologies were measured."""

    def step_ends(self, step: Step, after: int) -> None:
        """Called when a step is committed and the loop's body is done; ``after`` counts the steps committed so far."""

    def renewed(self) -> None:
        """Called when a new generation begins to compute."""

    def went_back(self, reached: int, step: int, doubt: Doubt) -> None:
        """Called when the run has gone back from one number of steps to another."""

    def healed(self, step: int, name: str, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        """Called when workers whose state differs from that of most are given the state of the others."""

    def wrong_result(self, step: int, finding: AuditResult, host: str) -> None:
        """Called when a worker's result of a shard differs from that of the others."""

    def repeated(self, step: int) -> None:
        """Called when a step is computed again, since memory did not keep what was written to it."""

    def resumed(self, replaced: Sequence[str]) -> None:
        """Called when the state of a checkpoint is restored, with the settings of the script that it has replaced."""

    def unregistered_scheduler(self, prepared: Prepared) -> None:
        """Called when a schedule may be in use that is not part of checkpoints."""

    def preempted(self) -> None:
        """Called when the workers leave because they were asked to."""

    def close(self) -> None:
        """Called when the run ends on this worker."""


class Listeners(Listener):
    """The listeners of a run as one, called in their order. An error in one ends the step, as in the script."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        for name in _EVENTS:
            setattr(self, name, together(own_methods(Listener, name, listeners)))
        self._timed = own_methods(Listener, "step_computed", listeners)

    def step_computed(self, step: Step, shards: int, seconds: float) -> None:
        """Call each listener; the seconds of later ones include the time that earlier ones took."""
        step.computed_s = seconds
        begun = perf_counter()
        for notify in self._timed:
            notify(step, shards, seconds + perf_counter() - begun)


_EVENTS = [name for name in vars(Listener) if not name.startswith("_") and name != "step_computed"]
