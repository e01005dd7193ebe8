"""The body of a loop: the beginning of a step, its calls of ``step.run``, and its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.optim import Optimizer

from unisono.data.generators import seed_generators
from unisono.data.shards import Source
from unisono.errors import JobError, ModelError
from unisono.named import extensions
from unisono.plan.order import Stream, stream_seed
from unisono.received import short
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.model.prepared import Prepared
from unisono.train.model.update import ScriptUpdate
from unisono.train.policy_runner import PolicyRunner
from unisono.train.record.metrics_line import MetricsLine
from unisono.train.recovery.recovery import Snapshots
from unisono.train.state.trained import RunProgress
from unisono.train.step.current import CurrentSteps, StepCall
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Clip, LossFunction, Step
from unisono.train.step.synchronisation import Synchronisation, Timer


@dataclass(eq=False)
class StepBody:
    """Carries out the steps of a loop. ``source`` loads samples that are not loaded yet; None before the first loop.

    ``has_begun`` and ``has_trained`` are about steps in this process.
    """

    run: RunBase
    collectives: CollectiveCalls
    steps: CurrentSteps
    synchronisation: Synchronisation
    snapshots: Snapshots
    policy_runner: PolicyRunner
    metrics: MetricsLine
    timer: Timer
    source: Source | None = field(default=None, init=False)
    has_begun: bool = field(default=False, init=False)
    has_trained: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.trained, self.membership, self.listeners = self.run.trained, self.run.membership, self.run.listeners
        config = self.run.config
        self._measures = config.recording.curvature is not None or config.execution.monitoring.curvature_every > 0

    @cached_property
    def curvature(self) -> Any:
        """The object that measures curvature on the batches of steps."""
        return extensions("measurement")["curvature"].load()(self.run, self.collectives, self.steps)

    def begin(self, step: Step) -> None:
        """Begin a step whose samples are loaded."""
        self.has_begun = True
        self.snapshots.settle()
        self.trained.go_on()  # all workers have agreed on the loop
        seed_generators(stream_seed(self.run.config.job.seed, Stream.SCRIPT, step.number))
        assert self.source is not None, "a step comes from a loop"
        step.generation, step.mark = self.membership.workers.generation.number, self.source.mark(step.batch)
        self.steps.step_begins(step)
        self.run.leave.catch_interrupts()
        self.listeners.step_begins(step)

    def compute(
        self,
        step: Step,
        loss_fn: LossFunction,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        clip: Clip,
        update: ScriptUpdate | None,
    ) -> float:
        """Carry out a call of ``step.run``."""
        self.run.ending.require_open()
        prepared = self.trained.prepared
        assert prepared is not None, "loops come after run.prepare"
        assert self.source is not None, "a step comes from a loop"
        if step is not self.steps.under_way:
            raise JobError("this step is over: call step.run in the body of the loop that it came from")
        if self.trained.is_doubted:  # the run goes back at the end of the body
            return self.metrics.newest_loss
        prepared.check_unchanged()
        self.trained.require_same_trained()
        self.steps.is_computing = True
        call = StepCall(step, loss_fn, _chosen(prepared, optimizer), clip, update, self.source)
        if self._measures and self.curvature.is_due(step):
            self.curvature.before(call)
        result = self.steps.computer.compute(call, self.collectives)
        self.steps.is_computing, self.has_trained = False, True
        step.metrics |= result.metrics
        step.is_skipped = result.is_skipped
        if not self.trained.is_doubted:
            self.listeners.call_done(step, call.optimizers, result)
        return result.loss

    def end(self, after: RunProgress | None) -> None:
        """End a step. If its body was left early and nothing of the step counts, ``after`` is None."""
        step, self.steps.under_way = self.steps.under_way, None
        if after is None or step is None or self.trained.is_doubted:
            return
        self.trained.progress = after
        count = self.collectives.step = after.position.step
        is_settled = self.synchronisation.step_ends(step)
        if self.policy_runner.links_are_due(count):
            self.synchronisation.before_call()
            self.policy_runner.measure_links()
        self.metrics.finish(step, self.policy_runner.rates)
        latest = self.metrics.latest
        if self.metrics.is_computed:
            self.timer.step_took(latest["seconds"], self.membership.workers.transport.traffic.take())
        shard_s = self.timer.shard_s if self.trained.policy_state.balances else 0.0
        self.membership.report_progress(self.collectives.progress, float(latest.get("samples_per_s", 0.0)), shard_s)
        self.listeners.step_ends(step, count)
        if is_settled:
            self.policy_runner.step_ends(step)
            self.steps.follow(self.collectives)

    def seed_behind(self, loop: int) -> None:
        """Seed the generators after a loop, so that a worker that has skipped it draws what the others draw."""
        seed_generators(stream_seed(self.run.config.job.seed, Stream.AFTER, loop))


def _chosen(prepared: Prepared, optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    if optimizer is None:
        return prepared.optimizers
    chosen = (
        (optimizer,) if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable) else tuple(optimizer)
    )
    for candidate in chosen:
        if not isinstance(candidate, Optimizer):
            raise JobError(f"step.run(optimizer={short(optimizer)}): needs an optimizer, or a list of them")
        if not any(candidate is known for known in prepared.optimizers):
            raise ModelError(f"step.run(optimizer={type(candidate).__name__}): give it to run.prepare first")
    if not chosen:
        raise JobError("step.run(optimizer=[]): name at least one optimizer, or leave it out for all of them")
    return chosen
