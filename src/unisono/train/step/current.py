"""The one who computes steps now, chosen by the strategy and made anew in every generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from unisono.adapt.curvature import Curvature
from unisono.adapt.curvature_question import CurvatureQuestion
from unisono.data.shards import Source
from unisono.device import HostRead
from unisono.errors import PolicyError
from unisono.sync.strategy import Strategy
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.workers import Workers
from unisono.train.model.own_update import OwnUpdate
from unisono.train.step.listeners import Computed
from unisono.train.step.loss import require_agreement
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Clip, LossFunction, Step

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


class CurrentSteps:
    """Chooses the step computer of each generation.

    Args:
        run: the base of the run, with the strategy to follow.
        exact: the step computer for strategies under which all workers always have the same weights.
        local: the step computer for the other strategies.

    Attributes:
        strategy: the strategy in use.
        under_way: the step whose body runs; None between steps.
        computer: the one who computes now.
        is_computing: true from the beginning of a call until it is counted; it stays true if the call fails.
    """

    def __init__(self, run: RunBase, exact: StepComputer, local: StepComputer) -> None:
        self._trained, self._membership, self._folder = run.trained, run.membership, run.folder
        self._exact, self._local = exact, local
        self.strategy = self._trained.policy_state.strategy
        self.under_way: Step | None = None
        self.is_computing = False
        self.computer = StepComputer()

    @property
    def was_written(self) -> bool:
        """Whether the script had changed since the last update what that had left, when steps were computed last."""
        return self._exact.was_written or self._local.was_written

    def shards(self) -> Sequence[int]:
        """Which shards of the next step this process loads, as far as that is known beforehand."""
        if self.computer.shares_work:
            return ()
        workers = self._membership.workers
        mine = workers.split(self._trained.policy_state.shards).of(workers.rank)
        return [turn.own for turn in workers.devices.rounds(mine)]

    def make(self) -> None:
        """Have the one compute that the present strategy needs, in the present generation. Collective."""
        self.drop()
        prepared, workers, policy_state = self._trained.prepared, self._membership.workers, self._trained.policy_state
        self.strategy = policy_state.strategy
        if prepared is None or not self._trained.has_weights:
            return
        if policy_state.topology is not None:
            workers.transport.use_topology(policy_state.topology)
        if not serve(workers, self.strategy) and workers.is_main:
            self._folder.journal("all compute", strategy=str(self.strategy), workers=workers.world_size)
        chosen, other = (self._exact, self._local) if self.strategy.is_exact else (self._local, self._exact)
        chosen.make(workers)
        other.retire()
        self.computer = chosen

    def make_together(self, workers: Workers) -> None:
        """Make what computes, as a collective call: so no worker goes on before all have."""
        self.make()
        workers.barrier()

    def drop(self) -> None:
        """The generation is over, or the strategy."""
        self.computer = StepComputer()
        self._exact.drop()
        self._local.drop()

    def forget(self) -> None:
        """This worker gets another state: what it had before does not count."""
        self._exact.forget()
        self._local.forget()

    def step_begins(self, step: Step) -> None:
        """The body of a step begins."""
        self.under_way = step
        self.computer.step_begins()

    def follow(self, collectives: CollectiveCalls) -> None:
        """Policies may have chosen another strategy."""
        policy_state = self._trained.policy_state
        if policy_state.strategy != self.strategy or (self.computer.has_own_weights and not policy_state.is_empty):
            collectives.together(self._switch)

    def _switch(self, workers: Workers) -> None:
        policy_state = self._trained.policy_state
        try:
            require_agreement(workers.transport, policy_state.digest)
        except PolicyError:
            policy_state.refuse(workers, self._trained.progress.position.step)
        if policy_state.strategy != self.strategy:
            self.make()


def serve(workers: Workers, strategy: Strategy) -> bool:
    """Have workers serve from the next step on, as a strategy wants it; or all compute. All workers do this alike.

    Args:
        workers: the workers of this generation.
        strategy: the strategy in use.

    Returns:
        whether that can be: else there are too few workers, and all of them serve and compute.
    """
    workers.servers = strategy.central_servers or 0
    # Where no worker only serves, each finishes a share; where some do, there is no other way.
    workers.transport.go_direct(always=strategy.central_servers == 0)
    return workers.servers < workers.world_size
