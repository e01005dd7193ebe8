"""The protocol of step computers, for exact steps and for those of workers with weights of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from unisono.adapt.curvature import Curvature
from unisono.adapt.curvature_question import CurvatureQuestion
from unisono.data.shards import Source
from unisono.device import HostRead
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.workers import Workers
from unisono.train.model.own_update import OwnUpdate
from unisono.train.step.call import Clip, LossFunction
from unisono.train.step.listeners import Computed
from unisono.train.step.step import Step

Told = Sequence[Mapping[str, Any]]
"""What every worker says when all synchronise: JSON values by name, by rank."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call of ``step.run``.

    Attributes:
        step: the present step.
        loss_fn: the loss function of the script.
        optimizers: the optimizers that make the update.
        clip: the limits on the gradient.
        update: the update that the script makes by itself; None for the optimizers' steps.
        source: a loader of samples that nobody has loaded yet.
    """

    step: Step
    loss_fn: LossFunction
    optimizers: tuple[Optimizer, ...]
    clip: Clip
    update: OwnUpdate | None
    source: Source


Tell = Callable[[], Mapping[str, Any]]
Hear = Callable[[Told], None]


class StepComputer:
    """Computes the steps of a run under some strategies, from generation to generation. This one computes none."""

    has_own_weights = False
    """Whether each worker has weights of its own between two synchronisations."""

    was_written = False
    """Whether the script had changed what the last update had left, when the last engine was closed."""

    @property
    def is_open(self) -> bool:
        """Whether workers may have other weights now."""
        return False

    @property
    def shares_work(self) -> bool:
        """Whether nobody knows beforehand which shards are its own."""
        return False

    @property
    def has_lost(self) -> bool:
        """Whether an update was made from a gradient that memory had not kept."""
        return False

    @property
    def has_flipped(self) -> bool:
        """Whether a bit is not as the last update has left it, where this worker has the only copy."""
        return False

    def make(self, workers: Workers) -> None:
        """Begin in a generation, under the present strategy. Collective."""

    def drop(self) -> None:
        """The generation is over, or the strategy."""

    def retire(self) -> None:
        """Another one computes from now on."""

    def forget(self) -> None:
        """This worker gets another state: what it had before does not count."""

    def step_begins(self) -> None:
        """A step begins: from now on only updates and the script change the state."""

    def compute(self, call: StepCall, collectives: CollectiveCalls) -> Computed:
        """Compute, and update the weights.

        Raises:
            UnisonoError: whatever :meth:`StepEngine.attempt` and :meth:`StepUpdate.work_out` raise.
        """
        raise NotImplementedError

    def measure(self, call: StepCall, question: CurvatureQuestion, collectives: CollectiveCalls) -> Curvature:
        """Measure curvature on the batch of a call. Collective; changes nothing."""
        raise NotImplementedError

    def step_ends(self, step: Step, collectives: CollectiveCalls, *, is_due: bool) -> bool:
        """A step is over on this worker.

        Args:
            step: the finished step.
            collectives: the collective calls.
            is_due: whether the workers are to synchronise whatever the strategy says.

        Returns:
            whether all workers have, or are to have, the same weights now.
        """
        return True

    def synchronise(self, step: int, told: Tell, heard: Hear, collectives: CollectiveCalls) -> Told:
        """Have all workers get the same weights.

        Args:
            step: steps committed so far.
            told: a function that returns what this worker has to say: JSON values by name.
            heard: a function that gets what every worker says, where weights are set.
            collectives: the collective calls.

        Returns:
            what every worker says, with its figures.
        """
        return []

    def log(self, name: str, value: float | HostRead) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        return False
