"""Computes steps: this worker's shards, the reduction, the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.adapt.squared_norms import SquaredNorms
from unisono.device import StreamMoment, is_accelerator
from unisono.errors import MemoryFault
from unisono.job import Job
from unisono.plan.audits import AuditResult
from unisono.plan.split import Split
from unisono.reduce.reducer import REDUCTIONS, Reducer
from unisono.reduce.tally import Witness
from unisono.spans import Spans
from unisono.train.config.run_config import Execution
from unisono.train.group.control import Balance, ControlWord, Flags, ShardReport, StepReport, signature_of
from unisono.train.group.majority import Verdict, judged
from unisono.train.group.workers import Round, Workers
from unisono.train.model.at_rest import Seen
from unisono.train.model.buffers import Buffers
from unisono.train.model.own_update import Scaled
from unisono.train.model.prepared import Prepared
from unisono.train.model.staging import staging_of
from unisono.train.model.update import Update
from unisono.train.step.audit import Audit
from unisono.train.step.gradients import Fusion, Gradients
from unisono.train.step.loss import ask_all, require_agreement
from unisono.train.step.shard_passes import EngineBase, ShardPasses, shared_report
from unisono.train.step.step import Call, global_norm
from unisono.train.step.step_update import Attempt, StepUpdate

if TYPE_CHECKING:
    from unisono.train.step.parallel_gradients import TensorParallel
    from unisono.train.step.pipeline import Pipeline
    from unisono.train.step.sliced_gradients import Slicing


class ReportExchange:
    """Tells the workers of a generation what their shards came to, and has all metrics known by name.

    Args:
        workers: the workers of the generation.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._known: dict[float, list[str]] = {signature_of(()): []}

    def told(
        self, rounds: Sequence[Round], reports: Sequence[ShardReport], used: Sequence[bool], flags: Flags
    ) -> tuple[StepReport, tuple[Flags, ...]]:
        """Tell all others, and hear them. Collective.

        Args:
            rounds: the rounds of this worker's shards.
            reports: the report of this device's shard of each round.
            used: a flag for each tensor: whether these shards have used it.
            flags: what this device has to say.

        Returns:
            the result of the step, and what each worker says.
        """
        split, transport = self._workers.transport.split, self._workers.transport
        word = ControlWord(split, len(used))
        reports, used, flags = shared_report(self._workers.devices, rounds, reports, used, flags)
        words = word.open(transport.all_gather(word.pack(reports, used, flags)))
        names = next((sorted(report.metrics) for report in reports if report.weight), None)
        logged = words.logged
        if logged is not None and words.has_silent_worker(split):
            if logged not in self._known:  # on any worker: all of them have seen the same
                everybody = self._workers.gather_json(names)
                self._known[logged] = next(known for known in everybody if known is not None)
            names = self._known[logged] if names is None else names
        return words.read(names or []), words.flags


MOST_REPEATS = 3
"""Of a step whose memory did not keep what was written; after that a worker's memory is broken for good."""


class StepEngine:
    """Computes and commits the calls of one generation, whatever number of shards their batches are cut into.

    Args:
        job: the job to train.
        workers: the workers of the generation.
        prepared: models and optimizers.
        device: the device on which to compute.
        execution: the settings of the computation that decide no bit.
        update: the update that is made with the step's gradient; by default the optimizers' own.
        rank: this worker's rank in messages; by default its rank among ``workers``.
        scaled: a context manager that changes the optimizers' learning rates for an update.
        found: a function that gets each result of an audit at once; an attempt has all results.
        repeats: a function that is called before a step is computed again, since memory did not keep what was written.
        has_lost: whether an earlier engine has made an update from a gradient that memory had not kept.
        survives: whether this worker goes on when others are lost. Then others may need what an update was made from.
        spans: the worker's spans, if they are kept.

    Attributes:
        passes: what computes this worker's shards.
        update: what makes the updates.
        witness: a function that gets what was written to checked memory; set in the middle of a run, to inject a fault.
    """

    def __init__(
        self,
        job: Job,
        workers: Workers,
        prepared: Prepared,
        device: torch.device,
        execution: Execution,
        update: Update | None = None,
        *,
        rank: int | None = None,
        scaled: Scaled = nullcontext,
        found: Callable[[AuditResult], None] = lambda finding: None,
        repeats: Callable[[int], None] = lambda step: None,
        has_lost: bool = False,
        survives: bool = False,
        spans: Spans | None = None,
    ) -> None:
        self._job, self._workers, self._prepared, self._execution = job, workers, prepared, execution
        self._device = device
        # By a call's number and shards: the seconds of the one before, which a device has told meanwhile.
        self._compute_s: dict[tuple[int, int], float] = {}
        overlap = execution.overlaps(workers.transport, job.threads)
        self._reducer = Reducer(workers.transport, REDUCTIONS[job.reduction], overlap=overlap, spans=spans)
        self._slicing, pipeline = _on_devices(prepared, workers, device, spans)
        self._buffers = Buffers(prepared.buffers, self._split, workers.rank, looks=execution.looks)
        self._gradients: dict[tuple[object, ...], Gradients] = {}
        self._exchange = ReportExchange(workers)
        self._audit = Audit(job.seed, execution.audit, workers)
        self._found, self._repeats, self._spans = found, repeats, spans
        self.witness: Witness | None = None
        rank = workers.rank if rank is None else rank
        base = EngineBase(job, workers, prepared, device, execution, self._buffers, rank, spans)
        self.passes = ShardPasses(base, pipeline)
        self.update = StepUpdate(
            base,
            update,
            norm_of=self._slicing.norm if self._slicing else global_norm,
            scaled=scaled,
            has_lost=has_lost,
            survives=survives,
            not_finite=self.passes.not_finite,
        )

    def attempt(self, call: Call, flags: Callable[[Seen], Flags] = lambda seen: Flags()) -> Attempt:
        """Compute this worker's shards and reduce. Changes no weight: it can be done again.

        Args:
            call: what to compute.
            flags: what this worker has to say when its shards are computed, told what it then finds in its memory;
                they ride with the control word.

        Raises:
            LossError, ModelError, NondeterministicOperation: the user's loss function or model; names the shard.
            MemoryFault: memory did not keep what was written, again and again.
            PolicyError: the workers' policies decided differently before the step.
            WorkerLost: another worker is gone.
        """
        if self._split != (split := self._workers.split(call.batch.shards)):
            self._resplit(split)
        self.update.begin()
        try:
            return self._whole_attempt(call, flags)
        except BaseException:
            self._reducer.abandon()
            self._buffers.rewind()  # or the next attempt would start from what this one left
            raise

    def discard(self) -> None:
        """An attempt is not to be committed: buffers are again as they were before it."""
        self._buffers.rewind()

    def close(self) -> None:
        """Let go of the model's parameters, and of the thread."""
        self._reducer.close()
        self._forget_gradients()

    @property
    def _split(self) -> Split:
        return self._workers.transport.split

    def _resplit(self, split: Split) -> None:
        """Workers have other shards, or as many pieces of them: let go of all that was made for those before."""
        self._prepared.clear_gradients()
        self._forget_gradients()
        self._workers.transport.resplit(split)
        self._buffers.resplit(self._split, self._workers.rank)

    def _forget_gradients(self) -> None:
        for gradients in self._gradients.values():
            gradients.remove()
        self._gradients.clear()

    def _whole_attempt(self, call: Call, flags: Callable[[Seen], Flags]) -> Attempt:
        """The first attempt that counts. All workers repeat the others alike."""
        findings: tuple[AuditResult, ...] = ()
        for _ in range(1 + MOST_REPEATS):
            attempt = self._attempt(call, flags)
            attempt.findings = findings
            if attempt.report.told.lost or judged(attempt.flags) is not Verdict.RIGHT:
                return attempt  # whoever computes with wrong weights is no worse a processor for that
            if attempt.report.told.again:
                attempt.gradients.stop_listening()
            elif not attempt.report.is_balanced:
                self._repeats(call.step)
            else:
                found = self._audited(call, attempt)
                attempt.findings = findings = (*findings, *found)
                if not any(finding.is_transient for finding in found):
                    return attempt
            self._buffers.rewind()
        raise MemoryFault(
            f"step {call.step}: {1 + MOST_REPEATS} times in a row partial sums were read that were not what had been "
            f"written, so the memory of one of these hosts is broken, or a connection between them. Nothing was "
            f"updated. Test the memory of the hosts, and start the job again without the one that fails"
        )

    def _attempt(self, call: Call, flags: Callable[[Seen], Flags]) -> Attempt:
        gradients = self._gradients_of(call)
        gradients.witness = self._buffers.witness = self.witness
        gradients.watch(call.step if self._execution.monitoring.watches(call.step, call.number) else None)
        started = StreamMoment(self._device)
        gradients.begin(call.step)
        shards = self.passes.compute(call, gradients, self._drawn(call))
        work = call.number, len(call.shards)
        call.computed(self._compute_s.get(work, perf_counter() - started.host_s))
        computed = StreamMoment(self._device)  # a worker that is slowed down waits in that call
        totals, reducing = gradients.totals()
        reduced = perf_counter()
        # Nobody else has what one worker has: it looks once all is worked out, right before the update. Before an audit
        # it looks as well.
        is_early = not self.update.watch.looks_last or bool(self._drawn(call))
        seen = self.update.watch.look() if is_early else Seen
        finite, reports = gradients.are_finite(), ask_all(shards)
        self._buffers.ask()
        self._workers.transport.settle()  # with one wait for all that was asked for
        own = flags(seen())
        asked = perf_counter()
        own = replace(
            own,
            again=gradients.came_twice,
            lost=self.update.has_lost,
            diverges=not finite(),
            balance=Balance(gradients.balance, gradients.copies),
        )
        used = [*gradients.used, *self._buffers.used]
        report, told = self._exchange.told(self.passes.rounds, reports(), used, own)
        done = perf_counter()
        compute_s = started.seconds_to(computed)
        if is_accelerator(self._device):
            self._compute_s = {work: compute_s}
        if self._spans is not None:
            self._spans.add("compute", started.host_s, started.host_s + compute_s)
            self._spans.add("exchange", asked, done)
            self._spans.add("exposed", started.host_s + compute_s, done)
        seconds = {
            "compute": compute_s,
            "exposed_communication": max(0.0, done - started.host_s - compute_s),
            "communication": reducing + done - reduced,
        }
        marks = {
            shard.number: shard.mark.finish(shard.report, self._buffers.result(shard.number))
            for shard in shards
            if shard.mark is not None
        }
        return Attempt(gradients, totals, report, told, seconds, marks=marks)

    def _audited(self, call: Call, attempt: Attempt) -> tuple[AuditResult, ...]:
        """Have drawn shards computed again, by others. Collective; what the attempt has made stays."""
        again = partial(self.passes.again, call, attempt.gradients)
        findings = self._audit.examine(call.step, self._drawn(call), attempt.marks, again)
        for finding in findings:
            self._found(finding)
        return findings

    def _drawn(self, call: Call) -> tuple[int, ...]:
        """The shards that are audited."""
        return self._audit.drawn(call.step, call.number, call.batch, is_last=call.is_last)

    def _gradients_of(self, call: Call) -> Gradients:
        reduced, trained = self._prepared.reduced_for(call.optimizers), self._prepared.trained_by(call.optimizers)
        strides = map(Tensor.stride, self._prepared.parameters.values())
        key = (*map(id, call.optimizers), len(reduced), *strides)
        if key not in self._gradients:
            require_agreement(self._workers.transport, call.decided)  # what follows is made together
            compressed = torch.bfloat16 if self._job.compression == "bf16" else None
            fusion = Fusion(self._job.bucket_bytes, compressed, self._execution.checked_bytes)
            norms = SquaredNorms(len(trained), self._execution.monitoring.blocks_of(trained.values()))
            self._gradients[key] = (
                self._slicing.gradients(trained, self._reducer, fusion, norms)
                if self._slicing
                else Gradients(reduced, self._reducer, fusion, norms, len(reduced) - len(trained))
            )
        return self._gradients[key]


def _on_devices(
    prepared: Prepared, workers: Workers, device: torch.device, spans: Spans | None
) -> tuple[Slicing | Pipeline | TensorParallel | None, Pipeline | None]:
    """What computes otherwise where a worker has several devices, and whether that are stages."""
    if workers.devices.count == 1:
        return None, None
    if workers.devices.is_parallel:
        from unisono.train.step.parallel_gradients import TensorParallel

        return TensorParallel(), None
    if (staging := staging_of(prepared.modules)) is None:
        from unisono.train.step.sliced_gradients import Slicing  # loads FSDP, which takes seconds

        return Slicing(prepared.modules, workers.devices), None
    from unisono.train.step.pipeline import Pipeline  # loads torch's pipelining, which takes seconds

    pipeline = Pipeline(prepared, staging, workers.devices, device, spans)
    return pipeline, pipeline
