"""Training under a strategy whose workers have weights of their own in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono.data.shards import ShardSource, ShardsRequest
from unisono.data.streams import generators_kept
from unisono.errors import JobError, WorkerLost
from unisono.failpoints import failpoint
from unisono.job import Job
from unisono.sync.parameter_server import ParameterServer
from unisono.sync.strategy import Strategy
from unisono.train.group.acts import Acts, Change
from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.loop.feed import to_device
from unisono.train.state.trained import Trained
from unisono.train.step.engine import Call
from unisono.train.step.step import Step
from unisono.train.step.surroundings import BACKSTOP
from unisono.train.strategies.rounds import Recipe, Rounds, begin_rounds
from unisono.train.strategies.synchroniser import Sums

# Which workers serve, by the strategy.


def serve(workers: Workers, strategy: Strategy) -> bool:
    """Have workers serve from the next step on, as a strategy wants it; or all compute. All workers do this alike.

    Args:
        workers: of this generation.
        strategy: that is in use.

    Returns:
        whether that can be: else there are too few workers, and all of them serve and compute.
    """
    central = strategy if isinstance(strategy, ParameterServer) and strategy.synchronous else None
    workers.servers = 0 if central is None else central.servers
    # Where no worker only serves, each finishes a share; where some do, there is no other way.
    workers.transport.go_direct(always=central is not None and not central.servers)
    return workers.servers < workers.world_size


# Training under a strategy whose workers have weights of their own in between.


class Apart:
    """A run's rounds, from generation to generation and from strategy to strategy.

    Args:
        job: that is trained.
        device: where this worker computes.
        trained: what is trained, with the strategy that is to be followed.
        membership: who trains.
        acts: the collective calls.
        timeout_s: how long another worker may be silent.
        begin: begins rounds in a generation, after those before under the same strategy. Collective.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        trained: Trained,
        membership: Membership,
        acts: Acts,
        timeout_s: float,
        begin: Callable[[Recipe, Workers, Rounds | None], Rounds] = begin_rounds,
    ) -> None:
        self._begin = begin
        self._job, self._device, self._trained = job, device, trained
        self._membership, self._acts = membership, acts
        self._timeout_s = BACKSTOP * timeout_s if membership.is_elastic else timeout_s
        self._rounds: Rounds | None = None
        self._before: Rounds | None = None  # of the generation or the strategy before
        self._loss = math.nan

    @property
    def rounds(self) -> Rounds | None:
        """Those of the present strategy; None where all workers always have the same weights."""
        return self._rounds

    @property
    def loss(self) -> float:
        """The newest that this worker knows of: of its own samples, or of all in a round; NaN if there is none."""
        return self._loss

    @property
    def is_open(self) -> bool:
        """Whether workers may have weights of their own now."""
        return self._rounds is not None and self._rounds.is_open

    def drop(self) -> None:
        """The generation is over, or the strategy."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.close()
            self._before = rounds

    def forget(self) -> None:
        """This worker gets another one's state: what it had before does not count."""
        self._before = None

    def make(self) -> None:
        """Begin, if the present strategy is one of these. Collective."""
        strategy = self._trained.adaptation.strategy
        assert self._trained.prepared is not None, "there is something to train"
        if strategy.is_exact:
            self._trained.strategy = "", {}  # what one kept that comes again later is of weights long gone
        else:
            scaled = self._trained.adaptation.scaled
            recipe = Recipe(strategy, self._job, self._trained.prepared, self._device, scaled, self._timeout_s)
            before = self._before
            is_same = before is not None and before.strategy == strategy
            rounds = self._begin(recipe, self._membership.workers, before if is_same else None)
            name, state = self._trained.strategy
            if name == str(strategy) and not rounds.goes_on:
                rounds.synchroniser.load_state_dict(state)
            self._rounds = rounds
        self._before = None

    def compute(
        self,
        step: Step,
        calls: Callable[[range, Sequence[Any]], Call],
        source: ShardSource,
    ) -> Sums:
        """Compute this worker's part of a step, and update its weights.

        Args:
            step: that is under way.
            calls: makes a call for some shards, whose batches are here.
            source: where shards come from that nobody has loaded yet.

        Returns:
            what the step came to on this worker alone.

        Raises:
            JobError: the step was computed already, and its work cannot be shared out again.
            UnisonoError: whatever the engine raises.
        """
        own = Sums()
        if step.calls and self._rounds is not None and self._rounds.shares_work:
            raise JobError(
                f"step.run was called twice in step {step.number}: with strategy={str(self._rounds.strategy)!r} a step "
                f"is whoever's comes first, so it has one call. Use all-reduce or local-sgd"
            )
        self._with_others(lambda rounds: rounds.begin())
        self._with_others(lambda rounds: self._parts(rounds, step, calls, source, own))
        self._loss = own.mean_loss(self._loss)
        return own

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """A step is over on this worker."""
        self._with_others(lambda rounds: rounds.step_ends(step, ends_round=ends_round))

    def come_together(
        self,
        step: int,
        told: Callable[[], Mapping[str, Any]],
        heard: Callable[[Sequence[Mapping[str, Any]]], None],
    ) -> list[dict[str, Any]]:
        """End the round: from here on all workers have the same weights.

        Args:
            step: steps committed so far.
            told: JSON values by name that this worker has to say.
            heard: is told what every worker says, where weights are set.

        Returns:
            what every worker says, with its figures of the round.
        """

        def end(workers: Workers) -> Change[list[dict[str, Any]]]:
            assert self._rounds is not None, "the strategy stays as long as a round is open"
            rounds, ended = self._rounds, self._rounds.end(step, told())

            def make() -> list[dict[str, Any]]:
                everybody = ended()
                heard(everybody)
                self._trained.strategy = str(rounds.strategy), rounds.synchroniser.state_dict()
                return everybody

            failpoint("round worked out")
            return Change(make)

        found = self._acts.change(end)
        if samples := sum(one["samples"] for one in found):
            self._loss = sum(one["loss"] for one in found) / samples
        return found

    def _parts(
        self,
        rounds: Rounds,
        step: Step,
        calls: Callable[[range, Sequence[Any]], Call],
        source: ShardSource,
        own: Sums,
    ) -> None:
        for part in rounds.parts(step.number, step.batch):
            shards = self._loaded(step, part, source) if rounds.shares_work else step.shards
            call = calls(part, shards)
            attempt = rounds.train(call)
            if attempt is not None:
                report = attempt.report
                own.add(call.batch.size, report.loss, report.metrics, attempt.seconds)

    def _loaded(self, step: Step, part: range, source: ShardSource) -> list[Any]:
        with generators_kept():
            shards = source.load(ShardsRequest(step.epoch, tuple(step.batch.shard(shard) for shard in part)))
        return [to_device(shard, self._device) for shard in shards]

    def _with_others(self, action: Callable[[Rounds], None]) -> None:
        """Do something in which others may be lost; then it is done again with those who are left."""
        while (rounds := self._rounds) is not None:
            try:
                if self._membership.workers.is_aborted:
                    raise WorkerLost("another worker was lost in the middle of a round")
                action(rounds)
            except WorkerLost as lost:
                self._acts.regroup(lost)
            else:
                return
