"""The step computer in use: chosen by the strategy, and made anew in every generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from unisono.data.shards import Source
from unisono.device import HostRead
from unisono.errors import PolicyError
from unisono.sync import Strategy
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.workers import Workers
from unisono.train.model.update import ScriptUpdate
from unisono.train.step.listeners import Computed
from unisono.train.step.loss import require_agreement
from unisono.train.step.placement import Placement
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Call, Clip, LossFunction, Step

Messages = Sequence[Mapping[str, Any]]
"""The messages that workers send each other when they synchronise: JSON values by name, one mapping per rank."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call of ``step.run``.

    Attributes:
        update: the update that the script makes by itself; None for the optimizers' steps.
        source: a loader of samples that have not been loaded yet.
    """

    step: Step
    loss_fn: LossFunction
    optimizers: tuple[Optimizer, ...]
    clip: Clip
    update: ScriptUpdate | None
    source: Source


Measure = Callable[[Any, Call], dict[str, Any]]
"""Measures something on a call. Its first argument is the engine, whose class the layers below do not know."""

Describe = Callable[[], Mapping[str, Any]]
Receive = Callable[[Messages], None]


class StepComputer:
    """Computes the steps of a run under some strategies, from one generation to the next. This one computes none."""

    has_own_weights = False
    """Whether each worker has weights of its own between two synchronisations."""

    @property
    def is_open(self) -> bool:
        """Whether the weights of workers may differ now."""
        return False

    @property
    def shares_work(self) -> bool:
        """Whether no worker knows its shards beforehand."""
        return False

    @property
    def was_written(self) -> bool:
        """Whether, when the last engine was closed, the script had changed what the last update had left."""
        return False

    @property
    def has_lost(self) -> bool:
        """Whether an update was made from a gradient whose bits had changed in memory."""
        return False

    @property
    def has_flipped(self) -> bool:
        """Whether a bit has changed since the last update, where this worker has the only copy."""
        return False

    def make(self, workers: Workers) -> None:
        """Begin a generation, under the present strategy. Collective."""

    def drop(self) -> None:
        """End the generation, or the use of the strategy."""

    def retire(self) -> None:
        """Note that another step computer is in use from now on."""

    def forget(self) -> None:
        """Forget what was known of the state, since this worker gets another one."""

    def step_begins(self) -> None:
        """Begin a step: from now on only updates and the script change the state."""

    def compute(self, call: StepCall, collectives: CollectiveCalls) -> Computed:
        """Compute a call, and update the weights.

        Raises:
            UnisonoError: any error of :meth:`StepEngine.attempt` and :meth:`StepEngine.work_out`.
        """
        raise NotImplementedError

    def measure(self, call: StepCall, measure: Measure, collectives: CollectiveCalls) -> dict[str, Any]:
        """Measure on the batch of a call, without changing anything. Collective.

        ``measure`` measures with the engine and the call, and returns JSON values by name.
        """
        raise NotImplementedError

    def step_ends(self, step: Step, collectives: CollectiveCalls, *, is_due: bool) -> bool:
        """End a step on this worker.

        ``is_due`` says that the workers have to synchronise even if the strategy does not ask for it. Return whether
        all workers have the same weights now, or will have them after synchronising.
        """
        return True

    def synchronise(self, step: int, describe: Describe, receive: Receive, collectives: CollectiveCalls) -> Messages:
        """Give all workers the same weights, after so many committed steps.

        ``describe`` returns this worker's message: JSON values by name. ``receive`` is called with the messages of all
        workers when weights are set. Return the messages of all workers, with their figures.
        """
        return []

    def log(self, name: str, value: float | HostRead) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        return False


class CurrentSteps:
    """Chooses the step computer of each generation.

    Attributes:
        under_way: the step whose body runs; None between steps.
        is_computing: true from the beginning of a call until it is counted; it stays true if the call fails.
    """

    def __init__(self, run: RunBase, exact: StepComputer, local: StepComputer) -> None:
        self._trained, self._membership, self._folder = run.trained, run.membership, run.folder
        self._run, self._exact, self._local = run, exact, local
        self.strategy = self._trained.policy_state.strategy
        self.under_way: Step | None = None
        self.is_computing = False
        self.computer = StepComputer()
        self._placement: Placement | None = None

    @property
    def was_written(self) -> bool:
        """Whether the script had changed what the last update had left, when the last engine was closed."""
        return self._exact.was_written or self._local.was_written

    def shards(self) -> Sequence[int]:
        """The shards of the next step that this process loads, as far as they are known beforehand."""
        if self.computer.shares_work:
            return ()
        workers = self._membership.workers
        own_shards = workers.split(self._trained.policy_state.shards).of(workers.rank)
        return own_shards if self._placement is None else [turn.own for turn in self._placement.rounds(own_shards)]

    def make(self) -> None:
        """Make the step computer for the present strategy and generation. Collective."""
        self.drop()
        prepared, workers, policy_state = self._trained.prepared, self._membership.workers, self._trained.policy_state
        self.strategy = policy_state.strategy
        self._placement = None if prepared is None else self._run.placement
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
        """Call :meth:`make`, and wait until all workers have done so."""
        self.make()
        workers.barrier()

    def drop(self) -> None:
        """End the generation, or the use of the strategy."""
        self.computer = StepComputer()
        self._exact.drop()
        self._local.drop()

    def forget(self) -> None:
        """Forget what was known of the state, since this worker gets another one."""
        self._exact.forget()
        self._local.forget()

    def step_begins(self, step: Step) -> None:
        """Begin the body of a step."""
        self.under_way = step
        self.computer.step_begins()

    def follow(self, collectives: CollectiveCalls) -> None:
        """Change to the strategy that policies may have chosen."""
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
    """Make some workers servers from the next step on, or none, as a strategy asks. All workers call this alike.

    Return whether there are enough workers; else all of them serve and compute.
    """
    workers.servers = strategy.central_servers or 0
    # Where no worker only serves, each finishes a share; where some do, there is no other way.
    workers.transport.go_direct(always=strategy.central_servers == 0)
    return workers.servers < workers.world_size
