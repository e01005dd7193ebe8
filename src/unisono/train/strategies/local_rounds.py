"""Steps that workers make by themselves, the moments at which all of them synchronise, and local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from unisono.device import HostRead
from unisono.errors import JobError
from unisono.plan.batches import Batch
from unisono.plan.split import Split
from unisono.received import imported
from unisono.spans import Spans
from unisono.sync import DiLoCo, LocalSGD
from unisono.train.config.run_config import Execution, RunConfig
from unisono.train.group.workers import Workers
from unisono.train.model.tensors import set_all, set_like
from unisono.train.state.trained import Trained
from unisono.train.step.gradient_parts import MemoryChecks
from unisono.train.step.part import Attempt
from unisono.train.step.step import Call
from unisono.train.step.step_engine import StepEngine
from unisono.train.strategies.synchroniser import Alone, Sums, SyncContext, Synchroniser


@dataclass(slots=True)
class RoundProgress:
    """The work of this worker since the workers last synchronised. ``begun`` is a time of :func:`time.perf_counter`."""

    steps: int = 0
    sums: Sums = field(default_factory=Sums)
    begun: float = field(default_factory=perf_counter)


class LocalRounds:
    """A generation's steps under one strategy whose workers have weights of their own in between.

    A round lies between two moments at which all workers hold the same weights. Making the rounds is collective. After
    a loss in the middle of a round, the workers that are left synchronise first.

    Args:
        synchroniser: the part of the strategy that exchanges weights between these workers; closed with the rounds.
        before: this worker's rounds in the generation before, under the same strategy; None for one that was given
            another worker's state.

    Attributes:
        is_open: whether anything was done since the workers last synchronised.
        is_resumed: whether a round of the generation before was broken off; the same on all workers.
        exchanged: the newest step after which this worker, or others without it, have exchanged weights.

    Raises:
        WorkerLost: from every method, when another worker is gone.
    """

    def __init__(
        self,
        config: RunConfig,
        trained: Trained,
        workers: Workers,
        synchroniser: Synchroniser,
        before: LocalRounds | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.is_open = self.is_resumed = False
        self.exchanged = -1
        self.progress = RoundProgress()
        self.strategy = trained.policy_state.strategy
        self._config, self._trained, self._workers, self._spans = config, trained, workers, spans
        self._engines: dict[int, StepEngine] = {}
        self._engine: StepEngine | None = None
        self._sent = workers.transport.traffic.sent_bytes, workers.transport.traffic.sent_messages
        self.synchroniser = synchroniser
        try:
            self._take_over(before)
        except BaseException:
            self.close()
            raise

    @property
    def shares_work(self) -> bool:
        """Whether the work is distributed while it is done, so that a worker does not know its part beforehand."""
        return self.synchroniser.parts > 0

    def begin(self) -> None:
        """Begin a step, on every worker."""
        if not self.is_open:
            self.synchroniser.round_begins()
        self.is_open = True
        self.progress.steps += 1
        self.synchroniser.step_begins()

    def parts(self, step: int, batch: Batch) -> Iterator[range]:
        """Yield the shards of a step that this worker computes, part by part. Empty parts are left out."""
        parts = self.synchroniser.parts
        if not parts:
            own_shards = self._workers.split(batch.shards).of(self._workers.rank)
            yield from [own_shards] if batch.part(own_shards).size else []
            return
        split = Split.even(batch.shards, parts)
        while (number := self.synchroniser.claim(step)) is not None:
            if batch.part(split.of(number)).size:
                yield split.of(number)

    def train(self, call: Call) -> Attempt:
        """Compute a part, and make this worker's update with it.

        Returns:
            the attempt. Its ``trouble`` says so if the loss or gradient is NaN or infinite, and such steps are skipped.

        Raises:
            UnisonoError: :meth:`StepEngine.attempt` or :meth:`StepEngine.work_out` has raised it.
        """
        self._engine = engine = self._engine_for(call.batch.shards)
        self._workers.is_called = True
        try:
            attempt = engine.attempt(call)
        finally:
            self._workers.is_called = False
        assert isinstance(attempt, Attempt), "nobody doubts what one worker computes by itself"
        engine.work_out(attempt)
        engine.make(attempt)
        if not attempt.trouble:
            self.progress.sums.add(call.batch.size, attempt.report.loss, attempt.report.metrics, attempt.seconds)
        return attempt

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """End a step on this worker. Called again if a worker was lost during it.

        What others had exchanged before the loss is not exchanged again: this worker would wait for them in vain.
        Nothing is exchanged either if the loop's body has made all workers synchronise, and has done nothing since.
        """
        if step > self.exchanged:
            if self.is_open:
                begun = perf_counter()
                self.synchroniser.step_ends(step, ends_round=ends_round)
                if self._spans is not None:
                    self._spans.add("synchronise", begun, perf_counter())
            self.exchanged = step

    def end(self, step: int, report: Mapping[str, Any]) -> Callable[[], list[dict[str, Any]]]:
        """Work out the weights with which all workers synchronise. Collective; it sets nothing yet.

        ``report`` is this worker's: JSON values by name.

        Returns:
            a function that ends the round here. It sets weights, and returns all workers' reports and figures, by rank.

        Raises:
            JobError: workers stand at different steps.
        """
        steps = self._workers.gather_json(step)
        if any(other != step for other in steps):
            places = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(steps))
            raise JobError(
                f"the workers synchronise after different steps ({places}): with strategy={str(self.strategy)!r} "
                f"each has a loss of its own, so leave loops by something that is the same on all, such as "
                f"run.evaluate or run.all_reduce"
            )
        set_weights = self.synchroniser.synchronise(after_loss=False)
        everybody = self._workers.gather_json({**report, **self._figures()})

        def make() -> list[dict[str, Any]]:
            set_weights()
            self.is_open = False
            self.progress = RoundProgress()
            return everybody

        return make

    def log(self, name: str, value: float | HostRead) -> bool:
        """Log a metric of the shard that is being computed; returns False if none is."""
        return self._engine is not None and self._engine.passes.log(name, value)

    def close(self) -> None:
        """Let go of connections and of the model's parameters."""
        self.synchroniser.close()
        for engine in self._engines.values():
            engine.close()

    def _figures(self) -> dict[str, Any]:
        """This worker's figures of the round. Workers are all synchronising, so the figures are complete."""
        sent_before, traffic = self._sent, self._workers.transport.traffic
        self._sent = traffic.sent_bytes, traffic.sent_messages
        return {
            "samples": self.progress.sums.samples,
            "loss": self.progress.sums.loss,
            "metrics": self.progress.sums.metrics,
            "steps": self.progress.steps,
            "seconds": perf_counter() - self.progress.begun,
            "sent": [self._sent[0] - sent_before[0], self._sent[1] - sent_before[1]],
            **self.synchroniser.figures(),
        }

    def _take_over(self, before: LocalRounds | None) -> None:
        # Workers that had not begun the round take part, too: others may have pushed to them, or asked for replicas.
        reports = self._workers.gather_json(None if before is None else [before.exchanged, before.is_open])
        known_reports = [report for report in reports if report is not None]
        self.is_resumed = self.is_open = any(is_open for _, is_open in known_reports)
        if not self.is_resumed:
            return
        self.exchanged = max(exchanged for exchanged, _ in known_reports)
        if before is not None:
            self.synchroniser.follow(before.synchroniser)
            self.progress = before.progress
        self.synchroniser.synchronise(after_loss=True)()
        self.synchroniser.resume()

    def _engine_for(self, shards: int) -> StepEngine:
        if shards not in self._engines:
            self._engines[shards] = StepEngine(
                self._config.job,
                Alone(self._workers, shards),
                self._trained.require_prepared(),
                self._config.device,
                Execution(overlap=False),
                [MemoryChecks()],
                update=self.synchroniser,
                scaled=self._trained.policy_state.scaled,
                spans=self._spans,
            )
        return self._engines[shards]


def begin_local_rounds(
    config: RunConfig, trained: Trained, workers: Workers, before: LocalRounds | None, spans: Spans | None = None
) -> LocalRounds:
    """Begin a generation's rounds under the present strategy. Collective."""
    return LocalRounds(config, trained, workers, synchroniser_of(config, trained, workers), before, spans)


def synchroniser_of(config: RunConfig, trained: Trained, workers: Workers) -> Synchroniser:
    """Make the synchroniser of the present strategy. Collective.

    Raises:
        JobError: the strategy has none.
    """
    strategy, timeout_s = trained.policy_state.strategy, config.connection.timeout_s
    if not strategy.part:
        raise JobError(f"strategy={str(strategy)!r} cannot be used here")
    synchroniser: Synchroniser = imported(strategy.part, "strategy")(
        SyncContext(workers, trained.require_prepared(), timeout_s, config.job.seed), strategy
    )
    return synchroniser


# The workers' parts in local SGD and DiLoCo.


class LocalUpdates(Synchroniser):
    """Makes updates on every worker by itself; every so many steps the weights become the mean of all workers'.

    Args:
        strategy: the settings: the number of steps between two means.
    """

    def __init__(self, context: SyncContext, strategy: LocalSGD) -> None:
        super().__init__(context)
        self.strategy = strategy

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """Average the weights, if it is time."""
        if (step + 1) % self.strategy.every == 0 and not ends_round:
            self._synchronised()()

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """Work out the means of weights, buffers and optimizer states."""
        weights = self._synchronised()
        buffers, states = self.replica.average_buffers(), self.replica.average_states()

        def make() -> None:
            weights()
            set_all(buffers)
            states()

        return make

    def _synchronised(self) -> Callable[[], None]:
        """Work out the weights that all workers will have. Collective. Returns a function that sets them here."""
        return partial(self.replica.load, [mean.clone() for mean in self.replica.mean()])


class OuterUpdates(LocalUpdates):
    """Local updates with an outer optimizer, whose velocity is the same on all workers.

    Args:
        strategy: the settings: the number of steps between two means, and those of the outer optimizer.
    """

    def __init__(self, context: SyncContext, strategy: DiLoCo) -> None:
        super().__init__(context, strategy)
        self._outer = strategy
        self._start = self.replica.copies()
        self._velocity = [torch.zeros_like(weight) for weight in self._start]
        self._steps = 0

    def follow(self, before: Synchroniser) -> None:
        """Take over the start, the velocity and the steps from before a loss."""
        super().follow(before)
        assert isinstance(before, OuterUpdates)
        self._start, self._velocity, self._steps = before._start, before._velocity, before._steps

    def round_begins(self) -> None:
        """Start at the present weights, which the script may have changed."""
        self._start = self.replica.copies()

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """Work out the means with an outer update."""
        if after_loss:  # some workers may have made an outer update that others have not
            self._start, self._velocity = self.common(self._start), self.common(self._velocity)
        return super().synchronise(after_loss=after_loss)

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """Count the step, and make the outer update if it is time."""
        self._steps += 1
        super().step_ends(step, ends_round=ends_round)

    def state_dict(self) -> dict[str, Any]:
        """Return the velocity."""
        return {"velocity": self._velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the velocity."""
        set_like(self._velocity, state.get("velocity"), "velocity")

    def _synchronised(self) -> Callable[[], None]:
        is_due = any(self.workers.gather_json(self._steps))
        mean = self.replica.mean()
        moved, velocity = self._start, self._velocity
        if is_due:  # without a step since the last time nothing has changed, and momentum alone must not move weights
            velocity = [tensor.clone() for tensor in self._velocity]
            triples = zip(self._start, mean, velocity, strict=True)
            moved = [self._outer.update(start, average, speed) for start, average, speed in triples]

        def make() -> None:
            if is_due:
                self.replica.load(moved)
            self._start, self._velocity, self._steps = moved, velocity, 0

        return make
