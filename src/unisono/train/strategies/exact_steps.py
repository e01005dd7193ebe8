"""Steps under strategies with which all workers always have the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from unisono.data.generators import generators_kept
from unisono.data.shards import Source
from unisono.device import HostRead
from unisono.errors import DataError, JobError, MemoryFault, PolicyError
from unisono.train.group.collectives import Change, CollectiveCalls
from unisono.train.group.workers import Workers
from unisono.train.loop.prefetch import to_device
from unisono.train.recovery.compared_steps import JudgedAudits, StateDigests
from unisono.train.recovery.integrity import Integrity
from unisono.train.step.current import Measure, StepCall, StepComputer
from unisono.train.step.gradient_parts import MemoryChecks, NoiseMonitor
from unisono.train.step.listeners import Computed, Counted
from unisono.train.step.owned_update import lone_update
from unisono.train.step.part import Attempt, Back, Part
from unisono.train.step.run_base import RunBase
from unisono.train.step.shard_watch import ShardWatch
from unisono.train.step.step import Call, Step
from unisono.train.step.step_engine import StepEngine
from unisono.train.step.synchronisation import RequestFields, TimeFields
from unisono.train.step.weights_watch import Followers, UpdateCause


@dataclass(eq=False)
class ExactSteps(StepComputer):
    """Computes steps whose update all workers make together.

    ``engine`` is that of this generation; None while these steps are not in use. ``further`` are the parts of a step
    that the script has added.
    """

    run: RunBase
    integrity: Integrity
    audits: JudgedAudits
    request_fields: RequestFields
    times: TimeFields
    newest_loss: Callable[[], float]
    engine: StepEngine | None = field(default=None, init=False)
    further: list[Part] = field(default_factory=list, init=False)
    _seconds: Mapping[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.memory, self.followers = MemoryChecks(self.run.listeners.repeated), Followers()
        self.watch = ShardWatch(self.run.states)
        self.digests = StateDigests(self.integrity, self.memory)
        self.config, self.trained, self.membership = self.run.config, self.run.trained, self.run.membership
        self.requests, self.listeners = self.run.requests, self.run.listeners

    @property
    def has_lost(self) -> bool:
        """Whether an update was made from a gradient that memory had not kept."""
        return self.memory.has_lost

    @property
    def has_flipped(self) -> bool:
        """Whether a bit has changed since the last update, where this worker has the only copy."""
        return self.digests.has_flipped

    @property
    def was_written(self) -> bool:
        """Whether the script had changed what the last update had left, when the last engine was closed."""
        return self.followers.was_written

    def make(self, workers: Workers) -> None:
        """Begin in a generation. Collective."""
        self.trained.strategy = "", {}  # a strategy that is used again later must not go on from old weights
        self.engine = StepEngine(
            self.config.job,
            workers,
            self.trained.require_prepared(),
            self.config.device,
            self.config.execution,
            self._parts(),
            scaled=self.trained.policy_state.scaled if self.trained.policy_state.may_scale else nullcontext,
            loss_scale=self.trained.loss_scale if self.config.job.precision == "fp16" else None,
            spans=self.run.spans,
        )

    def _parts(self) -> list[Part]:
        """The parts of a step that are on, in the order in which they hear what workers tell."""
        execution = self.config.execution
        # Requests come first: they count whatever the digests say. Digests come before the parts that they may forbid.
        parts: list[Part] = [self.request_fields, self.times]
        if execution.monitoring.every:  # before parts of the script, which may change the gradient that it measures
            parts.append(NoiseMonitor(execution.monitoring, self.trained))
        parts += [*self.further, self.watch, self.digests]
        if execution.checked_bytes != 0 or execution.looks:
            parts.append(self.memory)
        if execution.audit:
            parts.append(self.audits)
        if self.membership.is_elastic:
            parts.append(self.followers)
        return parts

    def add(self, part: Part) -> None:
        """Add a part of the script's own; see :meth:`Run.add_part`."""
        if self.trained.prepared is not None:
            raise JobError("run.add_part: call it before run.prepare")
        if not (strategy := self.trained.policy_state.strategy).is_exact:
            raise JobError(
                f"run.add_part: with strategy={str(strategy)!r} workers make steps by themselves, which have no "
                f"parts: use strategy='all-reduce'"
            )
        self.further.append(part)

    def described_parts(self) -> dict[str, str]:
        """Return the classes of the script's own parts, which have to be the same on all workers."""
        kinds = [
            f"{type(part).__module__}.{type(part).__qualname__}({', '.join(map(repr, part.fields))})"
            for part in self.further
        ]
        return {"parts of run.add_part": ", ".join(kinds) or "none"}

    def drop(self) -> None:
        """End the generation, or the strategy."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def forget(self) -> None:
        """Forget what updates were made from: this worker gets other weights."""
        self.memory.has_lost = False

    def step_begins(self) -> None:
        """Note that from now on only updates and the script change the state."""
        self.digests.step_begins()

    def compute(self, call: StepCall, collectives: CollectiveCalls) -> Computed:
        """Compute a call together with the others. Either all of them make the update, or none."""
        self._seconds = {}
        if call.update is not None:
            self.run.placement.require_whole(
                "step.run(update=…): an update of the script's own would see this device's slices alone. Leave it out, "
                "clip with step.run(clip_norm=…), or use one device per worker"
            )
        loss, metrics, figures, is_skipped = collectives.change(
            partial(self._train, call, collectives), partial(self._follow, call)
        )
        return Computed(loss, metrics, figures, self._seconds, call.step.size, is_skipped=is_skipped)

    def measure(self, call: StepCall, measure: Measure, collectives: CollectiveCalls) -> dict[str, Any]:
        """Measure on the batch of a call, without changing anything. Collective.

        Raises:
            JobError: a worker has several devices.
        """
        self.run.placement.require_whole(
            "run.curvature needs whole weights, and each worker has {} devices, which hold parts of them: use one "
            "device per worker, or write a checkpoint and measure there with unisono curvature"
        )

        def measured(workers: Workers) -> dict[str, Any]:
            own_shards = workers.split(call.step.batch.shards).of(workers.rank)
            # Nothing is updated, so a gradient that is too small for float16 is no more than an error of measurement.
            engine_call = replace(self._call(call, own_shards, workers.generation.number), scale=1.0)
            with self.trained.policy_state.scaled(engine_call.optimizers):  # as the next update will be
                return measure(self.require_engine(), engine_call)

        return collectives.together(measured)

    def log(self, name: str, value: float | HostRead) -> bool:
        """Log a metric of the shard that is being computed; returns False if none is."""
        return self.engine is not None and self.engine.passes.log(name, value)

    def require_engine(self) -> StepEngine:
        """Return the engine of this generation."""
        assert self.engine is not None, "these steps are in use"
        return self.engine

    def _train(self, call: StepCall, collectives: CollectiveCalls, workers: Workers) -> Change[_Result]:
        place = call.step.number, call.step.calls
        if (suspicion := self.integrity.settle_suspicion(workers, place)) is not None:
            return self._doubted(workers, Back(suspicion))
        engine, own_shards = self.require_engine(), workers.split(call.step.batch.shards).of(workers.rank)
        engine_call = self._call(call, own_shards, workers.generation.number)
        counted_shards = [turn.own for turn in engine.placement.rounds(own_shards) if turn.counts]
        self.times.formed_s = collectives.formed_s
        self.listeners.call_begins(engine_call, counted_shards, workers.generation.number)
        try:
            attempt = engine.attempt(engine_call)
        except PolicyError:
            _require_same_samples(workers, call)
            self.trained.policy_state.refuse(workers, engine_call.step)
        except MemoryFault:
            self.audits.discard_unconfirmed()
            raise
        if isinstance(attempt, Back):
            return self._doubted(workers, attempt)
        result, is_last = attempt.parts.judge(attempt), self.digests.looks_last
        if result is None and is_last:  # the only worker looks at its state as late as it can
            engine.work_out(attempt)
            result = attempt.parts.confirm(attempt)
        if result is not None:
            engine.discard()
            if isinstance(result, Back):
                return self._doubted(workers, result)
            # Most workers hold the same state. Once the others have it, too, the call begins anew.
            doubt = self.integrity.settle_majority(workers, place, collectives.recovery.heal)
            return self._train(call, collectives, workers) if doubt is None else self._doubted(workers, Back(doubt))
        while workers.is_main and workers.transport.measured:
            self.listeners.topology_measured(workers.transport.measured.pop(0))
        self.listeners.call_worked_out(engine_call, counted_shards, attempt.report)
        if not is_last:
            engine.work_out(attempt)
        make = partial(self._update, call.step, engine, attempt)
        then = partial(self._updated, attempt, workers)
        cause = None if attempt.trouble else self.followers.cause(engine_call)
        return Change(make, then) if cause is None else Change(make, then, cause.tree)

    def _call(self, call: StepCall, mine: range, generation: int) -> Call:
        step = call.step
        return Call(
            step.number,
            step.calls,
            step.batch,
            [to_device(shard, self.config.device) for shard in step.shards_in(generation)],
            call.loss_fn,
            call.optimizers,
            call.clip,
            call.update,
            load=partial(self._load, step, call.source),
            is_last=step.is_last,
            decided=self.trained.policy_state.digest + step.mark,  # below 2**49 and 2**32
            scale=self.trained.loss_scale.value if self.config.job.precision == "fp16" else 1.0,
            computed=partial(self.listeners.step_computed, step, len(mine)),
        )

    def _load(self, step: Step, source: Source, shard: int) -> Any:
        """Load the batch of any shard, also of another worker's."""
        with generators_kept():
            (batch,) = source.of(step.batch, [shard])
        return to_device(batch, self.config.device)

    def _doubted(self, workers: Workers, back: Back) -> Change[_Result]:
        """Return the change of a call that has shown the state to be wrong: it uses nothing that was computed."""

        def make() -> _Result:
            back.note()
            self.requests.note(regroup=bool(back.replaced))
            return self.newest_loss(), {}, {}, False

        def then() -> None:
            for rank in back.replaced:
                self.membership.replace(workers.generation.number, rank)

        return Change(make, then)

    def _update(self, step: Step, engine: StepEngine, attempt: Attempt) -> _Result:
        """Make the update of a step, and note what is known as long as its weights are there."""
        engine.make(attempt)
        if step.curvature and not step.calls:
            monitors = self.trained.monitors
            monitors.critical_step = step.curvature.get("critical_step", monitors.critical_step)
        is_skipped = bool(attempt.trouble)
        # An overflow is in the gradient only: the loss itself is right.
        loss = math.nan if is_skipped and not attempt.overflows else attempt.report.loss
        return loss, attempt.report.metrics, attempt.figures, is_skipped

    def _follow(self, call: StepCall, cause: Any) -> None:
        """Make an update here that others have made, from the gradient that they had."""
        prepared = self.trained.require_prepared()
        update_cause = UpdateCause.of(cause, prepared.buffers)
        prepared.clear_gradients()
        update_cause.set(prepared.reduced_for(call.optimizers), prepared.buffers)
        update = call.update or lone_update(prepared, self.membership.workers.devices)
        scaled = self.trained.policy_state.scaled
        with update.scaled_by(scaled, call.optimizers):
            update.work_out(call.optimizers)
            update.make(call.optimizers, update_cause.loss, scaled)

    def _updated(self, attempt: Attempt, workers: Workers) -> None:
        """Report that the update of a step is made on this worker, and counted."""
        self._seconds = attempt.seconds
        shards = len(workers.split(self.config.job.shards).of(workers.rank))
        skipped = attempt.report if attempt.trouble else None
        counted = Counted(workers.generation.number, attempt.seconds, shards, skipped, attempt.trouble)
        self.listeners.call_counted(attempt.call, counted)


def _require_same_samples(workers: Workers, call: StepCall) -> None:
    """Refuse data that give each worker an order of its own. Collective.

    Raises:
        DataError: they do.
    """
    marks, step = workers.gather_json(call.step.mark), call.step
    if differing := [rank for rank, mark in enumerate(marks) if mark != marks[0]]:
        raise DataError(
            f"step {step.number}, epoch {step.epoch}: rank {differing[0]} has other samples than rank 0. "
            f"{call.source.unlike}"
        )


_Result = tuple[float, Mapping[str, float], Mapping[str, Any], bool]
"""The result of all workers: the loss, metrics, measured figures, and whether nothing was updated."""
