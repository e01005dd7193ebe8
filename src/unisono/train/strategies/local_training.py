"""Training under strategies whose workers have weights of their own in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.data.generators import generators_kept
from unisono.data.shards import Source
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
from unisono.train.step.current import Describe, Measure, Messages, Receive, StepCall, StepComputer
from unisono.train.step.listeners import Computed, Listeners
from unisono.train.step.step import Call, Step
from unisono.train.strategies.local_rounds import LocalRounds, begin_local_rounds
from unisono.train.strategies.synchroniser import Sums

Begin = Callable[[RunConfig, Trained, Workers, LocalRounds | None], LocalRounds]
"""Begins rounds in a generation, given the rounds before them under the same strategy. Collective."""


class LocalTraining(StepComputer):
    """Computes a run's rounds, from generation to generation and from strategy to strategy.

    Args:
        begin: a function that begins rounds in a generation, given the rounds before them under the same strategy;
            collective.
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
        self._before: LocalRounds | None = None  # the rounds of the generation or the strategy before
        self._loss = math.nan  # the newest: over this worker's samples, or over all workers' in a round

    @property
    def is_open(self) -> bool:
        """Whether workers may have weights of their own now."""
        return self._rounds is not None and self._rounds.is_open

    @property
    def shares_work(self) -> bool:
        """Whether the work is distributed while it is done, so that a worker does not know its part beforehand."""
        return self._rounds is not None and self._rounds.shares_work

    def make(self, workers: Workers) -> None:
        """Begin rounds in a generation. Collective.

        Raises:
            JobError: the script has state that has to be combined in every step.
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
        if name == str(strategy) and not rounds.is_resumed:
            rounds.synchroniser.load_state_dict(state)
        self._rounds, self._before = rounds, None

    def drop(self) -> None:
        """End the generation, or the strategy."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.close()
            self._before = rounds

    def retire(self) -> None:
        """Forget the rounds, as another strategy computes: this one starts anew if it is used again."""
        self._before = None

    def forget(self) -> None:
        """Forget the rounds, as this worker gets another worker's state."""
        self._before = None

    def compute(self, call: StepCall, collectives: CollectiveCalls) -> Computed:
        """Compute this worker's part of a step, and update its weights.

        Raises:
            JobError: the step was computed already, and its work cannot be distributed again.
            UnisonoError: the engine has raised it.
        """
        sums, step = Sums(), call.step
        if call.update is not None:
            raise JobError(
                f"step.run(update=…): with strategy={str(self._trained.policy_state.strategy)!r} each worker has "
                f"weights of its own, and no gradient that all have. Leave update out, or use strategy='all-reduce'"
            )
        if step.calls and self._rounds is not None and self._rounds.shares_work:
            raise JobError(
                f"step.run was called twice in step {step.number}: with strategy={str(self._rounds.strategy)!r} "
                f"workers take parts of a step as they become free, so it has one call. Use all-reduce or local-sgd"
            )
        self._with_others(collectives, lambda rounds: rounds.begin())
        self._with_others(collectives, lambda rounds: self._parts(rounds, call, sums))
        if sums.skipped and not sums.samples:
            return Computed(math.nan, {}, {}, {}, 0, is_skipped=True)
        self._loss = sums.mean_loss(self._loss)
        return Computed(self._loss, sums.mean_metrics, {}, sums.seconds, sums.samples)

    def measure(self, call: StepCall, measure: Measure, collectives: CollectiveCalls) -> dict[str, Any]:
        """Refuse: there are no weights of all workers to measure at.

        Raises:
            JobError: always.
        """
        raise JobError(
            f"run.curvature: with strategy={str(self._trained.policy_state.strategy)!r} each worker has weights of its "
            f"own, so that there are no weights to measure at: use strategy='all-reduce'"
        )

    def step_ends(self, step: Step, collectives: CollectiveCalls, *, is_due: bool) -> bool:
        """End a step on this worker. Returns whether the round ends."""
        if self._rounds is None:
            return True
        ends = step.is_last_in_epoch or (step.number + 1) % self._rounds.strategy.round_steps == 0 or is_due
        self._with_others(collectives, lambda rounds: rounds.step_ends(step.number, ends_round=ends))
        return ends

    def synchronise(self, step: int, describe: Describe, receive: Receive, collectives: CollectiveCalls) -> Messages:
        """End the round: from now on all workers have the same weights."""

        def end(workers: Workers) -> Change[Messages]:
            assert self._rounds is not None, "the strategy stays as long as a round is open"
            rounds, end_round = self._rounds, self._rounds.end(step, describe())

            def make() -> Messages:
                everybody = end_round()
                receive(everybody)
                self._trained.strategy = str(rounds.strategy), rounds.synchroniser.state_dict()
                return everybody

            failpoint("round worked out")
            return Change(make)

        reports = collectives.change(end)
        if samples := sum(report["samples"] for report in reports):
            self._loss = sum(report["loss"] for report in reports) / samples
        return reports

    def log(self, name: str, value: float | HostRead) -> bool:
        """Log a metric of the shard that is being computed; returns False if none is."""
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
                self._listeners.part_skipped(step.number, attempt.trouble)
                own.skipped += 1
            else:
                report = attempt.report
                own.add(step.batch.part(part).size, report.loss, report.metrics, attempt.seconds)

    def _loaded(self, step: Step, part: range, source: Source) -> list[Any]:
        with generators_kept():
            shards = source.of(step.batch, part)
        return [to_device(shard, self._config.device) for shard in shards]

    def _with_others(self, collectives: CollectiveCalls, action: Callable[[LocalRounds], None]) -> None:
        """Do something during which other workers may be lost. It is then done again with those that are left."""
        while (rounds := self._rounds) is not None:
            try:
                if self._membership.workers.is_aborted:
                    raise WorkerLost("another worker was lost in the middle of a round")
                action(rounds)
            except WorkerLost as lost:
                collectives.regroup(lost)
            else:
                return
