"""Training under a strategy whose workers have weights of their own in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.adapt.curvature import Curvature
from unisono.adapt.curvature_question import CurvatureQuestion
from unisono.data.shards import Source
from unisono.data.streams import generators_kept
from unisono.device import HostRead
from unisono.errors import JobError, WorkerLost
from unisono.failpoints import failpoint
from unisono.train.config.run_config import RunConfig
from unisono.train.group.collectives import Change, CollectiveCalls
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.loop.prefetch import to_device
from unisono.train.model.shared_work import sharing_in
from unisono.train.state.trained import Trained
from unisono.train.step.current import Hear, StepCall, StepComputer, Tell, Told
from unisono.train.step.listeners import Computed, Listeners
from unisono.train.step.step import Call, Step
from unisono.train.strategies.local_rounds import LocalRounds, begin_local_rounds
from unisono.train.strategies.synchroniser import Sums

Begin = Callable[[RunConfig, Trained, Workers, LocalRounds | None], LocalRounds]
"""Begins rounds in a generation, after those before under the same strategy. Collective."""


class LocalTraining(StepComputer):
    """A run's rounds, from generation to generation and from strategy to strategy.

    Args:
        config: the configuration of the run.
        trained: the state of the run, with the strategy to follow.
        membership: the members of the job.
        listeners: the run's listeners, told of each part that is computed.
        begin: a function that begins rounds in a generation, after those before under the same strategy. Collective.
    """

    has_own_weights = True

    def __init__(
        self,
        config: RunConfig,
        trained: Trained,
        membership: Membership,
        listeners: Listeners,
        begin: Begin = begin_local_rounds,
    ) -> None:
        self._config, self._trained = config, trained
        self._membership, self._listeners, self._begin = membership, listeners, begin
        self._rounds: LocalRounds | None = None
        self._before: LocalRounds | None = None  # of the generation or the strategy before
        self._loss = math.nan  # the newest known: of this worker's own samples, or of all in a round

    @property
    def is_open(self) -> bool:
        """Whether workers may have weights of their own now."""
        return self._rounds is not None and self._rounds.is_open

    @property
    def shares_work(self) -> bool:
        """Whether a worker finds out what it computes when it gets there."""
        return self._rounds is not None and self._rounds.shares_work

    def make(self, workers: Workers) -> None:
        """Begin rounds. Collective.

        Raises:
            JobError: there is state that no two workers may have apart.
        """
        prepared = self._trained.require_prepared()
        if further := [place.name for place in prepared.buffers if place.chosen is not None]:
            raise JobError(
                f"run.prepare(state=…): with strategy={str(self._trained.policy_state.strategy)!r} workers train apart "
                f"between two rounds, and nobody combines {further[0]}. Leave state out, or use strategy='all-reduce'"
            )
        if sharing := sharing_in(prepared.optimizers):
            raise JobError(
                f"{type(sharing[0]).__name__} adds up statistics over all workers, which train apart with "
                f"strategy={str(self._trained.policy_state.strategy)!r}: use 'all-reduce', or another optimizer"
            )
        self._trained.anticipate()
        strategy, before = self._trained.policy_state.strategy, self._before
        is_same = before is not None and before.strategy == strategy
        rounds = self._begin(self._config, self._trained, workers, before if is_same else None)
        name, state = self._trained.strategy
        if name == str(strategy) and not rounds.goes_on:
            rounds.synchroniser.load_state_dict(state)
        self._rounds, self._before = rounds, None

    def drop(self) -> None:
        """The generation is over, or the strategy."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.close()
            self._before = rounds

    def retire(self) -> None:
        """Another one computes: a strategy that comes again later goes on with nothing."""
        self._before = None

    def forget(self) -> None:
        """This worker gets another one's state: what it had before does not count."""
        self._before = None

    def compute(self, call: StepCall, collectives: CollectiveCalls) -> Computed:
        """Compute this worker's part of a step, and update its weights.

        Raises:
            JobError: the step was computed already, and its work cannot be distributed again.
            UnisonoError: whatever the engine raises.
        """
        own, step = Sums(), call.step
        if call.update is not None:
            raise JobError(
                f"step.run(update=…): with strategy={str(self._trained.policy_state.strategy)!r} each worker has "
                f"weights of its own, and no gradient that all have. Leave update out, or use strategy='all-reduce'"
            )
        if step.calls and self._rounds is not None and self._rounds.shares_work:
            raise JobError(
                f"step.run was called twice in step {step.number}: with strategy={str(self._rounds.strategy)!r} a step "
                f"is whoever's comes first, so it has one call. Use all-reduce or local-sgd"
            )
        self._with_others(collectives, lambda rounds: rounds.begin())
        self._with_others(collectives, lambda rounds: self._parts(rounds, call, own))
        if own.skipped and not own.samples:
            return Computed(math.nan, {}, {}, {}, 0, is_skipped=True)
        self._loss = own.mean_loss(self._loss)
        return Computed(self._loss, own.mean_metrics, {}, own.seconds, own.samples)

    def measure(self, call: StepCall, question: CurvatureQuestion, collectives: CollectiveCalls) -> Curvature:
        """There is no model of all workers to measure at.

        Raises:
            JobError: says so.
        """
        raise JobError(
            f"run.curvature: with strategy={str(self._trained.policy_state.strategy)!r} each worker has weights of its "
            f"own, so that there are no weights to measure at: use strategy='all-reduce'"
        )

    def step_ends(self, step: Step, collectives: CollectiveCalls, *, is_due: bool) -> bool:
        """A step is over on this worker."""
        if self._rounds is None:
            return True
        ends = step.is_last_in_epoch or (step.number + 1) % self._rounds.strategy.round_steps == 0 or is_due
        self._with_others(collectives, lambda rounds: rounds.step_ends(step.number, ends_round=ends))
        return ends

    def synchronise(self, step: int, told: Tell, heard: Hear, collectives: CollectiveCalls) -> Told:
        """End the round: from here on all workers have the same weights."""

        def end(workers: Workers) -> Change[Told]:
            assert self._rounds is not None, "the strategy stays as long as a round is open"
            rounds, ended = self._rounds, self._rounds.end(step, told())

            def make() -> Told:
                everybody = ended()
                heard(everybody)
                self._trained.strategy = str(rounds.strategy), rounds.synchroniser.state_dict()
                return everybody

            failpoint("round worked out")
            return Change(make)

        found = collectives.change(end)
        if samples := sum(one["samples"] for one in found):
            self._loss = sum(one["loss"] for one in found) / samples
        return found

    def log(self, name: str, value: float | HostRead) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        return self._rounds is not None and self._rounds.log(name, value)

    def _parts(self, rounds: LocalRounds, call: StepCall, own: Sums) -> None:
        step = call.step
        for part in rounds.parts(step.number, step.batch):
            attempt = rounds.train(
                Call(
                    step.number,
                    step.calls,
                    step.batch.part(part),
                    self._loaded(step, part, call.source) if rounds.shares_work else step.shards,
                    call.loss_fn,
                    call.optimizers,
                    call.clip,
                    first=part.start,
                    computed=partial(self._listeners.step_computed, step, len(part)),
                )
            )
            if attempt.trouble:
                self._listeners.tell(lambda one, why=attempt.trouble: one.part_skipped(step.number, why))  # type: ignore[misc]
                own.skipped += 1
            else:
                report = attempt.report
                own.add(step.batch.part(part).size, report.loss, report.metrics, attempt.seconds)

    def _loaded(self, step: Step, part: range, source: Source) -> list[Any]:
        with generators_kept():
            shards = source.of(step.batch, part)
        return [to_device(shard, self._config.device) for shard in shards]

    def _with_others(self, collectives: CollectiveCalls, action: Callable[[LocalRounds], None]) -> None:
        """Do something in which others may be lost; then it is done again with those who are left."""
        while (rounds := self._rounds) is not None:
            try:
                if self._membership.workers.is_aborted:
                    raise WorkerLost("another worker was lost in the middle of a round")
                action(rounds)
            except WorkerLost as lost:
                collectives.regroup(lost)
            else:
                return
