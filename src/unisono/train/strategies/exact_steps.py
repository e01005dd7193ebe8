"""Steps under strategies with which all workers always have the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any
from zlib import crc32

from unisono.adapt.curvature import Curvature
from unisono.adapt.curvature_question import CurvatureQuestion
from unisono.adapt.view import Setting
from unisono.data.shards import Source
from unisono.data.streams import generators_kept
from unisono.device import HostRead
from unisono.errors import DataError, JobError, MemoryFault, PolicyError
from unisono.train.group.collectives import Change, CollectiveCalls
from unisono.train.group.majority import Verdict
from unisono.train.group.workers import Workers
from unisono.train.loop.prefetch import to_device
from unisono.train.model.own_update import UpdateCause
from unisono.train.model.update import settings_digest
from unisono.train.recovery.integrity import Integrity, Note
from unisono.train.recovery.verification import AuditJudge
from unisono.train.step.current import StepCall, StepComputer
from unisono.train.step.curvature_probe import CurvatureProbe, MeasuredCalls
from unisono.train.step.engine import StepEngine
from unisono.train.step.listeners import Computed, Counted
from unisono.train.step.owned_update import own_update_of
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Call, Step
from unisono.train.step.step_update import Attempt
from unisono.train.step.synchronisation import WorkerReport


@dataclass(eq=False)
class ExactSteps(StepComputer):
    """Computes steps whose update all workers make together.

    Attributes:
        run: the base of the run.
        integrity: the record of verified states, which judges the weights of each call.
        judge: the judge of audits.
        report: this worker's part of what all workers tell each other.
        newest_loss: a function that returns the newest loss in ``metrics.jsonl``.
        engine: the engine of this generation; None while these steps are not in use.
        was_written: whether the script had changed what the last update had left, when the last engine was closed.
    """

    run: RunBase
    integrity: Integrity
    judge: AuditJudge
    report: WorkerReport
    newest_loss: Callable[[], float]
    engine: StepEngine | None = field(default=None, init=False)
    was_written: bool = field(default=False, init=False)
    _had_lost: bool = field(default=False, init=False)  # in an engine before
    _seconds: Mapping[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.config, self.trained, self.membership = self.run.config, self.run.trained, self.run.membership
        self.requests, self.listeners = self.run.requests, self.run.listeners

    @property
    def has_lost(self) -> bool:
        """Whether an update was made from a gradient that memory had not kept."""
        return self._had_lost if self.engine is None else self.engine.update.has_lost

    @property
    def has_flipped(self) -> bool:
        """Whether a bit is not as the last update has left it, where this worker has the only copy."""
        return self.engine is not None and self.engine.update.watch.has_flipped

    def make(self, workers: Workers) -> None:
        """Begin in a generation. Collective."""
        self.trained.strategy = "", {}  # what one kept that comes again later is of weights long gone
        self.engine = StepEngine(
            self.config.job,
            workers,
            self.trained.require_prepared(),
            self.config.device,
            self.config.execution,
            scaled=self.trained.policy_state.scaled,
            found=self.judge.found,
            repeats=lambda step: self.listeners.tell(lambda one: one.repeated(step)),
            has_lost=self._had_lost,
            survives=self.membership.is_elastic,
            spans=self.run.spans,
        )

    def drop(self) -> None:
        """The generation is over, or the strategy."""
        if self.engine is not None:
            self.was_written = self.engine.update.watch.is_written
            self.engine.close()
            self._had_lost = self.engine.update.has_lost
            self.engine = None

    def forget(self) -> None:
        """Whatever this worker made an update from, the weights are others."""
        self._had_lost = False

    def step_begins(self) -> None:
        """From now on only updates and the script change the state."""
        self.require_engine().update.watch.step_begins()

    def compute(self, call: StepCall, collectives: CollectiveCalls) -> Computed:
        """Compute the call with the others; all make the update, or none."""
        self._seconds = {}
        if call.update is not None:
            self._require_whole_weights()
        loss, metrics, figures, is_skipped = collectives.change(
            partial(self._train, call, collectives), partial(self._follow, call)
        )
        return Computed(loss, metrics, figures, self._seconds, call.step.size, is_skipped=is_skipped)

    def measure(self, call: StepCall, question: CurvatureQuestion, collectives: CollectiveCalls) -> Curvature:
        """Measure curvature on the batch of a call. Collective; changes nothing.

        Raises:
            JobError: a worker has several devices.
        """
        if (devices := self.membership.workers.devices.count) > 1:
            raise JobError(
                f"run.curvature needs whole weights, and each worker has {devices} devices, which hold parts of them: "
                f"use one device per worker, or write a checkpoint and measure there with unisono curvature"
            )

        def found(workers: Workers) -> dict[str, Any]:
            mine = workers.split(call.step.batch.shards).of(workers.rank)
            # Nothing is updated, so a gradient that is too small for float16 is no more than an error of measurement.
            made = replace(self._call(call, mine, call.source.mark(call.step.batch)), scale=1.0)
            prepared = self.trained.require_prepared()
            calls = MeasuredCalls(self.require_engine(), prepared)
            probe = CurvatureProbe(calls, prepared, made, self.config.job.seed)
            with self.trained.policy_state.scaled(made.optimizers):  # as the next update will be
                return asdict(probe.measure(question))

        return Curvature(**collectives.together(found))

    def log(self, name: str, value: float | HostRead) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        return self.engine is not None and self.engine.passes.log(name, value)

    def require_engine(self) -> StepEngine:
        """The engine of this generation."""
        assert self.engine is not None, "these steps are in use"
        return self.engine

    def _train(self, call: StepCall, collectives: CollectiveCalls, workers: Workers) -> Change[_Found]:
        place = call.step.number, call.step.calls
        if (suspicion := self.integrity.settle_suspicion(workers, place)) is not None:
            return self._doubted(workers, suspicion)
        engine, mine = self.require_engine(), workers.split(call.step.batch.shards).of(workers.rank)
        samples = call.source.mark(call.step.batch)
        made = self._call(call, mine, samples)
        own = [turn.own for turn in workers.devices.rounds(mine) if turn.counts]
        self.listeners.tell(lambda one: one.call_begins(made, own, workers.generation.number))
        try:
            attempt = engine.attempt(made, partial(self.report.flags, collectives.formed_s))
        except PolicyError:
            _require_same_samples(workers, call, samples)
            self.trained.policy_state.refuse(workers, made.step)
        except MemoryFault:
            self.judge.discard_unconfirmed()
            raise
        audited, wrong = self.judge.judged(workers, attempt.findings, engine.discard)
        if wrong:
            return self._doubted(workers, audited, wrong)
        work_out, is_last = partial(engine.update.work_out, made, attempt), engine.update.watch.looks_last
        update = work_out() if is_last else None
        given = self._given(made, attempt) if self.integrity.is_on else ()
        verdict, note = self.integrity.judge(place, engine.update.watch.looked_last(attempt.flags), given)
        if verdict is not Verdict.RIGHT:
            engine.discard()
            healing = verdict is Verdict.HEALING
            doubt = self.integrity.settle_majority(workers, place, collectives.recovery.heal) if healing else note
            return self._train(call, collectives, workers) if doubt is None else self._doubted(workers, doubt)
        while workers.is_main and workers.transport.measured:
            about = workers.transport.measured.pop(0)
            self.listeners.tell(lambda one, about=about: one.topology_measured(about))  # type: ignore[misc]
        self.listeners.tell(lambda one: one.call_worked_out(made, own, attempt.report))
        update = update if is_last else work_out()
        make = partial(self._update, call.step, attempt, update, self.trained.setting(workers), (audited, note))
        then = partial(self._updated, made, attempt, workers, is_skipped=update is None)
        cause = None if update is None else engine.update.watch.cause(made)
        return Change(make, then) if cause is None else Change(make, then, cause.tree)

    def _call(self, call: StepCall, mine: range, samples: int) -> Call:
        step = call.step
        return Call(
            step.number,
            step.calls,
            step.batch,
            [to_device(shard, self.config.device) for shard in step.shards],
            call.loss_fn,
            call.optimizers,
            call.clip,
            call.update,
            load=partial(self._load, step, call.source),
            is_last=step.is_last,
            decided=self.trained.policy_state.digest + samples,  # below 2**49 and 2**32
            scale=self.trained.loss_scale.value if self.config.job.precision == "fp16" else 1.0,
            computed=partial(self.listeners.step_computed, step, len(mine)),
        )

    def _given(self, call: Call, attempt: Attempt) -> list[int]:
        """What is to be the same if the call is computed again: digests of settings, limits and the loss."""
        settings = settings_digest(self.trained.require_prepared().optimizers)
        return [settings, *(crc32(repr(one).encode()) for one in (call.clip, attempt.report.loss))]

    def _load(self, step: Step, source: Source, shard: int) -> Any:
        """The batch of any shard, whoever computes it."""
        with generators_kept():
            (found,) = source.of(step.batch, [shard])
        return to_device(found, self.config.device)

    def _doubted(self, workers: Workers, note: Note, replaced: Sequence[int] = ()) -> Change[_Found]:
        """A call has shown that the state is not to be gone on from: what it has computed is not used.

        Args:
            workers: the workers of this generation.
            note: the change that marks the state as doubted.
            replaced: the ranks of workers that compute wrongly, and are to leave.
        """

        def make() -> _Found:
            note()
            self.requests.note(regroup=bool(replaced))
            return self.newest_loss(), {}, {}, False

        def then() -> None:
            for rank in replaced:
                self.membership.replace(workers.generation.number, rank)

        return Change(make, then)

    def _update(
        self, step: Step, attempt: Attempt, update: Callable[[], None] | None, setting: Setting, notes: Sequence[Note]
    ) -> _Found:
        """Make the update of a step, and note what is known of it as long as its weights are."""
        if update is not None:
            update()
            if self.config.job.precision == "fp16":
                self.trained.loss_scale.updated()
        elif attempt.overflows:
            self.trained.loss_scale.overflowed()
        report, told = attempt.report, attempt.report.told
        self.requests.note(leave=told.leave, regroup=told.regroup, checkpoint=told.checkpoint)
        if not step.calls:
            monitors = self.trained.monitors
            monitors.time(setting, [flags.timings for flags in attempt.flags])
            monitors.critical_step = step.curvature.get("critical_step", monitors.critical_step)
        figures = {} if update is None else self._figures(step, attempt)
        for note in notes:
            note()
        is_skipped = update is None
        # What has overflown is the gradient, of a loss that is as good as any.
        loss = math.nan if is_skipped and not attempt.overflows else report.loss
        return loss, report.metrics, figures, is_skipped

    def _follow(self, call: StepCall, cause: Any) -> None:
        """Others have made an update: make it here, from the gradient that they had."""
        prepared = self.trained.require_prepared()
        given = UpdateCause.of(cause, prepared.buffers)
        prepared.clear_gradients()
        given.set(prepared.reduced_for(call.optimizers), prepared.buffers)
        scaled = self.trained.policy_state.scaled
        if call.update is not None:
            call.update.make(given.loss, call.optimizers, scaled)
            return
        update = own_update_of(prepared, self.membership.workers.devices)
        with scaled(call.optimizers):
            update.work_out(call.optimizers)
            update.apply(call.optimizers)

    def _require_whole_weights(self) -> None:
        """An update that the script makes by itself is one of whole weights.

        Raises:
            JobError: the model lies in slices.
        """
        if self.membership.workers.devices.count > 1:
            raise JobError(
                "step.run(update=…): an update of the script's own would see this device's slices alone. Leave it out, "
                "clip with step.run(clip_norm=…), or use one device per worker"
            )

    def _updated(self, call: Call, attempt: Attempt, workers: Workers, *, is_skipped: bool) -> None:
        """The update of a step is made on this worker, and counted."""
        self._seconds = attempt.seconds
        counted = Counted(
            workers.generation.number,
            attempt.seconds,
            len(workers.split(self.config.job.shards).of(workers.rank)),
            attempt.report if is_skipped else None,
            attempt.trouble,
        )
        self.listeners.tell(lambda one: one.call_counted(call, counted))

    def _figures(self, step: Step, attempt: Attempt) -> dict[str, Any]:
        """What is measured of a call, besides its loss."""
        found: dict[str, Any] = {}
        adapts, monitors = not self.trained.policy_state.is_empty, self.trained.monitors
        if attempt.norms is not None:
            losses = [part.loss for part in attempt.report.shards if part.weight]
            found |= monitors.see(step.number, attempt.norms, losses)
            found |= {"norms": asdict(attempt.norms)} if adapts else {}
        if (attempt.norms is not None or adapts or self.config.settings.special.study) and not step.calls:
            found |= monitors.times
        elif not step.calls:
            found["shard_s"] = [float(f"{each.shard_s:.4g}") for each in monitors.timings]
        return found


def _require_same_samples(workers: Workers, call: StepCall, mark: int) -> None:
    """Refuse data that give each worker an order of its own. Collective.

    Raises:
        DataError: they do.
    """
    marks, step = workers.gather_json(mark), call.step
    if odd := [rank for rank, one in enumerate(marks) if one != marks[0]]:
        raise DataError(
            f"step {step.number}, epoch {step.epoch}: rank {odd[0]} has other samples than rank 0. {call.source.unlike}"
        )


_Found = tuple[float, Mapping[str, float], Mapping[str, Any], bool]
"""What all workers come to: the loss, metrics, figures that were measured, and whether nothing was updated."""
