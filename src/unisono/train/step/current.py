"""The one who computes steps now, chosen by the strategy and made anew in every generation."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.checkpoint.folder import RunFolder
from unisono.device import HostRead
from unisono.errors import PolicyError
from unisono.sync.strategy import Strategy
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.state.trained import Trained
from unisono.train.step.computer import StepComputer
from unisono.train.step.loss import require_agreement
from unisono.train.step.step import Step


class CurrentSteps:
    """Chooses the step computer of each generation.

    Args:
        trained: the state of the run, with the strategy to follow.
        membership: the members of the job.
        folder: the run folder, with the journal.
        exact: the step computer for strategies under which all workers always have the same weights.
        local: the step computer for the other strategies.

    Attributes:
        strategy: the strategy in use.
        under_way: the step whose body runs; None between steps.
        is_computing: true from the beginning of a call until it is counted; it stays true if the call fails.
    """

    def __init__(
        self, trained: Trained, membership: Membership, folder: RunFolder, exact: StepComputer, local: StepComputer
    ) -> None:
        self.strategy = trained.policy_state.strategy
        self.under_way: Step | None = None
        self.is_computing = False
        self._trained, self._membership, self._folder = trained, membership, folder
        self._exact, self._local = exact, local
        self._computer: StepComputer | None = None

    @property
    def has_own_weights(self) -> bool:
        """Whether each worker has weights of its own between two synchronisations."""
        return self._computer is not None and self._computer.has_own_weights

    @property
    def is_open(self) -> bool:
        """Whether workers may have other weights now."""
        return self._computer is not None and self._computer.is_open

    @property
    def has_lost(self) -> bool:
        """Whether an update was made from a gradient that memory had not kept."""
        return self._computer is not None and self._computer.has_lost

    @property
    def has_flipped(self) -> bool:
        """Whether a bit is not as the last update has left it."""
        return self._computer is not None and self._computer.has_flipped

    @property
    def was_written(self) -> bool:
        """Whether the script had changed since the last update what that had left, when steps were computed last."""
        return self._exact.was_written or self._local.was_written

    @property
    def computer(self) -> StepComputer:
        """Who computes now."""
        assert self._computer is not None, "all workers have the same models"
        return self._computer

    def shards(self) -> Sequence[int]:
        """Which shards of the next step this process loads, as far as that is known beforehand."""
        if self._computer is not None and self._computer.shares_work:
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
        self._computer = chosen

    def make_together(self, workers: Workers) -> None:
        """Make what computes, as a collective call: so no worker goes on before all have."""
        self.make()
        workers.barrier()

    def drop(self) -> None:
        """The generation is over, or the strategy."""
        self._computer = None
        self._exact.drop()
        self._local.drop()

    def forget(self) -> None:
        """This worker gets another state: what it had before does not count."""
        self._exact.forget()
        self._local.forget()

    def step_begins(self, step: Step) -> None:
        """The body of a step begins."""
        self.under_way = step
        if self._computer is not None:
            self._computer.step_begins()

    def log(self, name: str, value: float | HostRead) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        return self._computer is not None and self._computer.log(name, value)

    def follow(self, collectives: CollectiveCalls) -> None:
        """Policies may have chosen another strategy."""
        policy_state = self._trained.policy_state
        if policy_state.strategy != self.strategy or (self.has_own_weights and not policy_state.is_empty):
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
