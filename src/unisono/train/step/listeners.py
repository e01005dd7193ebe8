"""Whoever wants to know what happens in a run, and is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch.optim import Optimizer

from unisono.data.order import Order
from unisono.plan.audits import AuditResult
from unisono.plan.batches import Batches
from unisono.train.group.control import StepReport
from unisono.train.model.prepared import Prepared
from unisono.train.state.trained import Doubt
from unisono.train.step.step import Call, Step


@dataclass(frozen=True, slots=True)
class Counted:
    """An update that is made on this worker, and counted.

    Attributes:
        generation: the number of the generation that made it.
        seconds: the seconds that it took, by part.
        shards: the number of this worker's shards.
        skipped: the report of a call whose update was left out, since its loss or gradient is no number.
        why: the loss or gradient that is no number, in words; empty if the update is made.
    """

    generation: int
    seconds: Mapping[str, float]
    shards: int
    skipped: StepReport | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a call of ``step.run``.

    loss: the mean loss.
        loss: the mean.
        metrics: the means of what the loss functions logged.
        figures: further measurements, by name.
        seconds: the seconds of each part; empty if the result was taken from other workers.
        samples: the number of samples whose loss this worker knows; 0 if there is nothing to tell.
        is_skipped: whether nothing was updated.
    """

    loss: float
    metrics: Mapping[str, float]
    figures: Mapping[str, Any]
    seconds: Mapping[str, float]
    samples: int
    is_skipped: bool = False


class Listener:
    """Is told what happens on this worker, and changes nothing of the training. Each overrides what it wants."""

    def prepared(self, prepared: Prepared, step: int) -> None:
        """All workers have these models, after so many steps."""

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """A loop over a data set begins."""

    def step_begins(self, step: Step) -> None:
        """A step's samples are here, and nothing of it is computed."""

    def call_begins(self, call: Call, shards: Sequence[int], generation: int) -> None:
        """This worker is about to compute these shards."""

    def step_computed(self, step: Step, shards: int, seconds: float) -> None:
        """It has computed so many, in so many seconds, and has the others' yet to add."""

    def call_worked_out(self, call: Call, shards: Sequence[int], report: StepReport) -> None:
        """All have computed the call, and no update is made yet. Before collectives that work the update out."""

    def call_counted(self, call: Call, counted: Counted) -> None:
        """The call's update is made here, and counted."""

    def part_skipped(self, step: int, why: str) -> None:
        """This worker, which updates weights of its own, makes no update from its part of a step."""

    def call_done(self, step: Step, optimizers: Sequence[Optimizer], done: Computed) -> None:
        """A call of ``step.run`` is over."""

    def round_ended(self, told: Sequence[Mapping[str, Any]], strategy: str) -> None:
        """All workers have the same weights again, and have told what they did since."""

    def links_measured(self, links: Mapping[str, Any]) -> None:
        """The connections between workers were measured."""

    def topology_measured(self, about: Mapping[str, Any]) -> None:
        """Ways of the partial sums were measured."""

    def step_ends(self, step: Step, after: int) -> None:
        """A step is committed, and the loop's body done; so many steps are committed now."""

    def renewed(self) -> None:
        """A new generation computes."""

    def went_back(self, reached: int, step: int, doubt: Doubt) -> None:
        """The run has gone back from one count of steps to another."""

    def healed(self, step: int, what: str, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        """Workers that held another state than most are given theirs."""

    def wrong_result(self, step: int, finding: AuditResult, host: str) -> None:
        """A worker computed a shard otherwise than the others."""

    def repeated(self, step: int) -> None:
        """A step is computed again, since memory did not keep what was written to it."""

    def resumed(self, replaced: Sequence[str]) -> None:
        """All of a checkpoint's state is restored, and these settings of the script are replaced."""

    def unregistered_scheduler(self, prepared: Prepared) -> None:
        """A schedule may be in use that checkpoints do not have."""

    def preempted(self) -> None:
        """The workers were asked to leave, and go."""

    def close(self) -> None:
        """The run ends on this worker."""


class Listeners:
    """The listeners of a run, in the order in which they are told. What one raises ends the step, as if the script had.

    Args:
        each: those who listen.
    """

    def __init__(self, each: Sequence[Listener]) -> None:
        self._each = tuple(each)

    def tell(self, what: Callable[[Listener], None]) -> None:
        """Tell each the same."""
        for one in self._each:
            what(one)

    def step_computed(self, step: Step, shards: int, seconds: float) -> None:
        """Tell each; what those before have taken is part of the time of which the later ones hear."""
        step.computed_s = seconds
        begun = perf_counter()
        for one in self._each:
            one.step_computed(step, shards, seconds + perf_counter() - begun)
