"""Computes steps: the shards of this worker, the reduction and the update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from time import perf_counter

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.adapt.squared_norms import SquaredNorms
from unisono.device import StreamMoment, is_accelerator
from unisono.errors import MemoryFault
from unisono.job import Job
from unisono.plan.split import Split
from unisono.reduce.partial_sums import Witness
from unisono.reduce.reducer import Reducer
from unisono.spans import Spans
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Workers
from unisono.train.model.buffers import Buffers
from unisono.train.model.places import set_places
from unisono.train.model.prepared import Prepared
from unisono.train.model.shared_work import sharing_in
from unisono.train.model.update import Scaled, Update, may_change_gradients
from unisono.train.state.trained import LossScale
from unisono.train.step.gradient_parts import Clipping, FiniteSums, WholeGradients
from unisono.train.step.gradients import Fusion, Gradients
from unisono.train.step.loss import ask_all, require_agreement
from unisono.train.step.owned_update import whole_update
from unisono.train.step.part import Attempt, Back, EngineBase, Hearing, Part, Parts
from unisono.train.step.placements import placement_of
from unisono.train.step.shared_pieces import SharedPieces
from unisono.train.step.step import Call
from unisono.train.step.weights_watch import ForwardWrites
from unisono.train.step.word import ReportExchange

MOST_REPEATS = 3
"""The number of times that a step is repeated when memory did not keep what was written; more mean broken memory."""


class StepEngine:
    """Computes and commits the calls of one generation, whatever number of shards their batches are cut into.

    Args:
        execution: the settings of the computation that do not change bits.
        parts: the optional parts of a step that are on.
        update: the update that is made with the step's gradient; by default the optimizers' own.
        scaled: a context manager that changes the optimizers' learning rates for an update.
        loss_scale: the factor of losses, with ``precision="fp16"``; None without.

    Attributes:
        parts: the parts of every step, without those that only some calls have.
        finite: the part that refuses sums that are not finite.
        witness: a function that gets what was written to checked memory; set in the middle of a run, to inject a fault.
    """

    def __init__(
        self,
        job: Job,
        workers: Workers,
        prepared: Prepared,
        device: torch.device,
        execution: Execution,
        parts: Sequence[Part] = (),
        update: Update | None = None,
        *,
        scaled: Scaled = nullcontext,
        loss_scale: LossScale | None = None,
        spans: Spans | None = None,
    ) -> None:
        overlap = execution.overlaps(workers.transport, job.threads)
        self._reducer = Reducer(workers.transport, job.reduction, overlap=overlap, spans=spans)
        self.placement = placement_of(prepared, workers)
        buffers = Buffers(prepared.buffers, workers.transport.split, workers.rank, looks=execution.looks)
        self._base = EngineBase(job, workers, prepared, device, execution, buffers, spans)
        self._workers, self._buffers, self._has_buffers = workers, buffers, bool(prepared.buffers)
        self.passes = self.placement.passes(self._base)
        self.finite = FiniteSums(self._base, loss_scale, self.passes)
        for part in parts:
            part.join(self._base)
        writes = ForwardWrites(prepared.weights(), self._base.rank)
        self.parts = Parts([WholeGradients(), self.finite, writes, *parts])
        self._exchange = ReportExchange(workers, self.parts.fields)
        self._gradients: dict[tuple[object, ...], Gradients] = {}
        self._parts_by_kind: dict[tuple[bool, tuple[Optimizer, ...]], Parts] = {}
        self._update, self._scaled = update or whole_update(prepared, workers, execution), scaled
        self._clock = StepClock(self._base)
        self.witness: Witness | None = None

    def attempt(self, call: Call, *, measures: bool = False) -> Attempt | Back:
        """Compute this worker's shards and reduce their gradients. Changes no weight, so it can be repeated.

        In a call that only measures, workers agree on nothing.

        Raises:
            LossError, ModelError, NondeterministicOperation: the user's loss function or model failed; names the shard.
            MemoryFault: memory did not keep what was written, several times in a row.
            PolicyError: the workers' policies decided differently before the step.
            WorkerLost: another worker is lost.
        """
        if self._workers.transport.split != (split := self._workers.split(call.batch.shards)):
            self._resplit(split)
        parts, exchange = self._measuring if measures else (self._parts_of(call), self._exchange)
        parts.begin(call)
        if self._has_buffers:
            self._buffers.begin()
        try:
            for _ in range(1 + MOST_REPEATS):
                attempt, result = self._attempt(call, parts, exchange)
                if isinstance(result, Back):
                    self._buffers.rewind()
                    return result
                if result is not Hearing.AGAIN:
                    return attempt
                self._buffers.rewind()
        except BaseException:
            self._reducer.abandon()
            self._buffers.rewind()  # or the next attempt would start with what this one has left
            raise
        raise MemoryFault(
            f"step {call.step}: partial sums differed {1 + MOST_REPEATS} times in a row from what was written, so the "
            f"memory of one of these hosts is faulty, or a connection between them. Nothing was "
            f"updated. Test the memory of the hosts, and start the job again without the one that fails"
        )

    def work_out(self, attempt: Attempt) -> None:
        """Work out the update of an attempt, the same on every worker. Collective; changes neither weights nor buffers.

        If the step is skipped, ``attempt.trouble`` says why: its loss is NaN or infinite, with ``on_nan="skip"``, or a
        part has reported a fault of the memory.

        Raises:
            NonFiniteLoss: names step, shard and rank, and the parameter whose gradient is not finite.
        """
        self._clock.update_begins()
        try:
            trouble = self.finite.trouble(attempt) or self._worked_out(attempt)
        except BaseException:
            # If a worker is lost, the step is computed again, and needs the buffers with which it began.
            self._buffers.rewind()
            raise
        if trouble:
            self.finite.left_out(attempt, trouble)

    def _worked_out(self, attempt: Attempt) -> str:
        """Work the update out; returns the reason for not making it, if there is one."""
        call, gradients, report, parts = attempt.call, attempt.gradients, attempt.report, attempt.parts
        count = len(gradients.names)
        # Optimizers must not see the gradients that this worker's last shard has left in other parameters.
        self._base.prepared.clear_gradients(but=gradients.parameters)
        # Looked up in every step: the script may have registered hooks since the last one.
        attempt.changes = call.update is not None or any(map(may_change_gradients, call.optimizers))
        writable = attempt.changes or parts.writes_gradient
        gradients.assign(attempt.totals, report.weight * call.scale, report.used[:count], writable=writable)
        parts.gradient(attempt)
        if self._has_buffers:
            samples = [len(call.batch.shard(shard)) for shard in range(call.batch.shards)]
            attempt.buffers = self._buffers.reduced(self._workers.transport, report.used[count:], samples)
        update = call.update or self._update
        with update.scaled_by(self._scaled, call.optimizers):
            update.work_out(call.optimizers)
            parts.work_out(attempt)
        self._workers.transport.settle()
        self._workers.devices.settle()
        if self.witness is not None:
            gradients.checks.show()  # before the last look, which has to find what the witness changes
        parts.look(attempt)
        return parts.refuse(attempt)

    def make(self, attempt: Attempt) -> None:
        """Make the update that was worked out, if there is one. Neither collective nor I/O."""
        call, parts = attempt.call, attempt.parts
        if not attempt.trouble:
            if attempt.buffers:
                set_places(attempt.buffers)
            update = call.update or self._update
            with update.scaled_by(self._scaled, call.optimizers):
                parts.apply(attempt)
                update.make(call.optimizers, attempt.report.loss, self._scaled)
            parts.done(attempt)
            if call.update is None:  # an update of the script's own decides itself what it leaves in gradients
                attempt.gradients.release(attempt.report.used)
            self._clock.update_ends(attempt)
        parts.note(attempt)

    def discard(self) -> None:
        """Give up an attempt: set the buffers to what they were before it."""
        self._buffers.rewind()

    def close(self) -> None:
        """Release the model's parameters, and the reducer's thread."""
        self.parts.leave()
        self._reducer.close()
        self._forget_gradients()

    def _resplit(self, split: Split) -> None:
        """Prepare for another split of the shards among workers: drop everything that was made for the last one."""
        self._base.prepared.clear_gradients()
        self._forget_gradients()
        self._workers.transport.resplit(split)
        self._buffers.resplit(split, self._workers.rank)
        self.passes.resplit()

    def _forget_gradients(self) -> None:
        for gradients in self._gradients.values():
            gradients.remove()
        self._gradients.clear()

    @cached_property
    def _measuring(self) -> tuple[Parts, ReportExchange]:
        """The parts that take part in calls that only measure, and the exchange of their fields."""
        parts = Parts([part for part in self.parts.all if part.measures])
        return parts, ReportExchange(self._workers, parts.fields)

    def _attempt(self, call: Call, parts: Parts, exchange: ReportExchange) -> tuple[Attempt, Hearing | Back | None]:
        """Compute this worker's shards, and exchange the results of all workers' shards. Collective."""
        gradients, clock = self._gradients_of(call), self._clock
        attempt = Attempt(call, gradients, partial(self.passes.again, call, gradients), parts)
        gradients.checks.witness = self._buffers.witness = self.witness
        clock.begin()
        parts.attempt(attempt)
        gradients.begin(call.step)
        attempt.shards = self.passes.compute(call, gradients, attempt.audited)
        parts.computed(attempt)
        call.computed(clock.compute_s(call))
        clock.computed()
        attempt.totals, reducing_s = gradients.totals()
        reduced_s = perf_counter()
        parts.ask(attempt)
        reports = ask_all(attempt.shards)
        if self._has_buffers:
            self._buffers.ask()
        self._workers.transport.settle()  # waits once for everything that was asked for above
        values = parts.tell(attempt)
        reported_s = perf_counter()
        used = [*gradients.used, *self._buffers.used] if self._has_buffers else gradients.used
        exchanged = exchange.send_and_receive(*self.passes.of_worker(parts.fields, (values, reports(), used)))
        attempt.report, attempt.seconds = exchanged[0], clock.exchanged(call, reducing_s, reduced_s, reported_s)
        return attempt, parts.hear(attempt, *exchanged[1])

    def _parts_of(self, call: Call) -> Parts:
        """The parts of calls with the same limits and optimizers."""
        kind = call.clip.limits, call.optimizers
        if (parts := self._parts_by_kind.get(kind)) is None:
            further: list[Part] = []
            if call.clip.limits:
                further.append(Clipping(self.placement.norm))
            if sharing_in(call.optimizers):
                further.append(SharedPieces(self._workers, self._base.execution.shared_from))
            parts = self._parts_by_kind[kind] = Parts([*self.parts.all, *further]) if further else self.parts
        return parts

    def _gradients_of(self, call: Call) -> Gradients:
        prepared, execution, job = self._base.prepared, self._base.execution, self._base.job
        reduced, trained = prepared.reduced_for(call.optimizers), prepared.trained_by(call.optimizers)
        strides = map(Tensor.stride, prepared.parameters.values())
        key = (*map(id, call.optimizers), len(reduced), *strides)
        if key not in self._gradients:
            # Making gradients is collective, so all workers have to make the same ones.
            require_agreement(self._workers.transport, call.decided)
            compressed = torch.bfloat16 if job.compression == "bf16" else None
            fusion = Fusion(job.bucket_bytes, compressed, execution.checked_bytes)
            norms = SquaredNorms(len(trained), execution.monitoring.blocks_of(trained.values()))
            statistics = len(reduced) - len(trained)
            self._gradients[key] = self.placement.gradients(reduced, self._reducer, fusion, norms, statistics)
        return self._gradients[key]


class StepClock:
    """Measures the parts of a step one after the other, and notes them as spans if those are kept."""

    def __init__(self, base: EngineBase) -> None:
        self._device, self._spans = base.device, base.spans
        self._is_accelerator = is_accelerator(base.device)
        # By a call's number and count of shards: the seconds of the last such call, as the device has reported them.
        self._compute_s: dict[tuple[int, int], float] = {}
        self._update: tuple[StreamMoment, StreamMoment] | None = None

    def begin(self) -> None:
        """Begin when the shards of a call are about to be computed."""
        self._started = StreamMoment(self._device)

    def compute_s(self, call: Call) -> float:
        """The seconds that the shards of a call took; on an accelerator, those of the last such call."""
        return self._compute_s.get((call.number, len(call.shards)), perf_counter() - self._started.host_s)

    def computed(self) -> None:
        """Note the end of the computation of the shards, after the delay of a fault that slows a worker down."""
        self._computed = StreamMoment(self._device)

    def exchanged(self, call: Call, reducing_s: float, reduced_s: float, reported_s: float) -> dict[str, float]:
        """Note the end of the exchange between workers.

        ``reducing_s`` are seconds. ``reduced_s`` is the moment at which the sums of all workers were here, and
        ``reported_s`` the moment at which devices had reported what is sent to the other workers. Return the seconds of
        each part so far.
        """
        done, begun, compute_s = perf_counter(), self._started.host_s, self._started.seconds_to(self._computed)
        if self._is_accelerator:
            self._compute_s = {(call.number, len(call.shards)): compute_s}
        if self._spans is not None:
            self._spans.add("compute", begun, begun + compute_s)
            self._spans.add("exchange", reported_s, done)
            self._spans.add("exposed", begun + compute_s, done)
        return {
            "compute": compute_s,
            "exposed_communication": max(0.0, done - begun - compute_s),
            "communication": reducing_s + done - reduced_s,
        }

    def update_begins(self) -> None:
        """Begin when the update is about to be worked out."""
        self._started = StreamMoment(self._device)

    def update_ends(self, attempt: Attempt) -> None:
        """Note the end of the update."""
        started, ended = self._started, StreamMoment(self._device)
        # This does not wait for a device. If it still computes, the time of the update before is taken.
        begun, done = (started, ended) if ended.is_over else self._update or (started, ended)
        attempt.seconds["update"], self._update = begun.seconds_to(done), (started, ended)
        if self._spans is not None:
            self._spans.add("update", started.host_s, ended.host_s)
