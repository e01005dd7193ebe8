"""Computes steps: this worker's shards, the reduction, the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.adapt.norms import GradientNorms
from unisono.adapt.squared_norms import SquaredNorms
from unisono.data.streams import generators_kept
from unisono.errors import LossError, MemoryFault, ModelError, NonFiniteLoss
from unisono.job import Job
from unisono.plan.audits import AuditResult
from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.reducer import REDUCTIONS, Reducer
from unisono.reduce.tally import Witness
from unisono.spans import Spans
from unisono.train.config.run_config import Execution
from unisono.train.group.control import Balance, ControlWord, Flags, StepReport, signature_of
from unisono.train.group.devices import Round
from unisono.train.group.majority import Verdict, judged
from unisono.train.group.workers import Workers
from unisono.train.model.at_rest import AtRest, Seen, kept_by
from unisono.train.model.body_writes import BodyWrites
from unisono.train.model.buffers import Buffers
from unisono.train.model.forward_writes import ForwardWrites
from unisono.train.model.own_update import OwnUpdate, Scaled, UpdateCause
from unisono.train.model.places import set_places
from unisono.train.model.prepared import Prepared
from unisono.train.model.shared_work import sharing_in
from unisono.train.model.staging import staging_of
from unisono.train.model.update import Update, may_change_gradients
from unisono.train.step.audit import Audit
from unisono.train.step.call import Call, global_norm
from unisono.train.step.device_exchange import shared_buffers, shared_report, shared_weights
from unisono.train.step.gradients import Fusion, Gradients
from unisono.train.step.loss import ForwardPass, Shard, require_agreement, total_weight
from unisono.train.step.owned_update import whole_update
from unisono.train.step.script_memory import ScriptMemory
from unisono.train.step.sharded_update import ShardedUpdate
from unisono.train.step.shared_pieces import SharedPieces
from unisono.train.step.why_whole import why_whole

if TYPE_CHECKING:
    from unisono.train.step.parallel_gradients import TensorParallel
    from unisono.train.step.pipeline import Pipeline
    from unisono.train.step.sliced_gradients import Slicing

MOST_REPEATS = 3
"""Of a step whose memory did not keep what was written; after that a worker's memory is broken for good."""


@dataclass(slots=True)
class Attempt:
    """A computed, not yet committed call. Norms of its gradients come with its update, if they are wanted."""

    gradients: Gradients
    totals: tuple[Tensor, ...]
    report: StepReport
    flags: tuple[Flags, ...]
    seconds: dict[str, float]
    norms: GradientNorms | None = None
    marks: dict[int, str] = field(default_factory=dict)
    findings: tuple[AuditResult, ...] = ()


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
        memory: the memory in which the script sees what the workers of a host share; by default a new one.
        stays_whole: a function that gets the reason for which updates are not split for now.
        spans: the worker's spans, if they are kept.

    Attributes:
        has_lost: whether this engine has made such an update, or an earlier one.
        why_whole: the reason for which each worker makes whole updates; empty if they split them.
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
        memory: ScriptMemory | None = None,
        stays_whole: Callable[[str], None] = lambda why: None,
        spans: Spans | None = None,
    ) -> None:
        self._job = job
        self._workers = workers
        self._rank = workers.rank if rank is None else rank
        overlap = execution.overlaps(workers.transport, job.threads)
        self._reducer = Reducer(workers.transport, REDUCTIONS[job.reduction], overlap=overlap, spans=spans)
        self._prepared, self._devices, self._monitoring = prepared, workers.devices, execution.monitoring
        self._slicing, self._pipeline = _on_devices(prepared, workers, device, spans)
        self._forward = ForwardPass(job, prepared, device, spans)
        self._writes = ForwardWrites(prepared.weights())
        self._buffers = Buffers(prepared.buffers, workers.transport.split, workers.rank)
        self._gradients: dict[tuple[object, ...], Gradients] = {}
        self._known: dict[float, list[str]] = {signature_of(()): []}
        self._scaled, self._found, self._repeats, self._spans = scaled, found, repeats, spans
        self.witness: Witness | None = None
        self._checked_bytes = execution.checked_bytes
        self._audit = Audit(job.seed, execution.audit, workers)
        self.has_lost = has_lost
        self._cause = UpdateCause() if survives and workers.world_size > 1 else None
        self._body = BodyWrites(
            list(prepared.weights().values()), self._buffer_tensors, partial(kept_by, prepared.optimizers)
        )
        self._update: Update | ShardedUpdate = update or whole_update(prepared, workers, execution)
        self._pieces = SharedPieces(workers, execution.shard_optimizer)
        self.why_whole = (
            why_whole(prepared, workers, execution, survives=survives)
            if update is None
            else "the strategy makes the update"
        )
        if not self.why_whole:
            self._update = ShardedUpdate(
                prepared,
                workers.transport,
                self._bucket_bytes,
                memory or ScriptMemory(),
                moves=self._let_go,
                moved=self._look_anew,
                stays_whole=stays_whole,
                looks=execution.looks,
                survives=survives,
            )
        self._at_rest = self._looking() if execution.looks else None

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
        if self._cause is not None:
            self._body.begin()
        self._update.begin(lambda: not self.has_flipped)
        self._buffers.begin()
        if self._at_rest is not None:
            self._at_rest.begin()
        try:
            return self._whole_attempt(call, flags)
        except BaseException:
            self._reducer.abandon()
            self._buffers.rewind()  # or the next attempt would start from what this one left
            raise

    def discard(self) -> None:
        """An attempt is not to be committed: buffers are again as they were before it."""
        self._buffers.rewind()

    @torch.no_grad()
    def mean_gradient(self, call: Call) -> tuple[float, list[Tensor]]:
        """The mean loss of a call, and its gradient for each parameter; zero where no shard used one. Collective.

        Changes neither weights nor buffers.

        Raises:
            NonFiniteLoss: names step, shard and rank.
        """
        with torch.enable_grad():
            attempt = self.attempt(call)
        self._buffers.rewind()
        if trouble := self._trouble(call, attempt.report):
            self._prepared.clear_gradients()
            raise NonFiniteLoss(f"step {call.step}: {trouble}")
        gradients, report = attempt.gradients, attempt.report
        gradients.assign(attempt.totals, report.weight, report.used[: len(gradients.names)], writable=True)
        trained = self._prepared.trained_by(call.optimizers).values()
        found = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in trained]
        self._prepared.clear_gradients()
        return report.loss, found

    def measured(self) -> None:
        """A call that has only measured is over, and the script goes on in the same body."""
        if self._cause is not None:
            self._body.goes_on()

    def mean_loss(self, call: Call, elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext) -> float:
        """The mean loss of a call, by forward passes alone. Collective; changes neither weights nor buffers.

        Args:
            call: the call.
            elsewhere: a function that returns a context in which the shards' losses are computed.
        """
        rows = self.shard_figures(call, elsewhere)
        tree = SummationTree(call.batch.shards)
        parts = [loss * weight for loss, weight in rows], [weight for _, weight in rows]
        loss, weight = (
            tree.finish({Node(n, n + 1): part for n, part in enumerate(each)}, lambda one, other: one + other)
            for each in parts
        )
        return float(loss / weight) if weight else math.nan

    def shard_figures(
        self,
        call: Call,
        elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext,
        further: Callable[[], Sequence[float]] = tuple,
    ) -> list[list[float]]:
        """Figures of each shard of a call, by passes that change neither weights nor buffers. Collective.

        Args:
            call: the call.
            elsewhere: a function that returns a context in which the shards' losses are computed.
            further: a function that is called after each shard with samples, and returns more figures of it.

        Returns:
            by shard: the loss, its weight, and what ``further`` has returned.
        """
        self._buffers.begin()
        told = list[list[float]]()
        try:
            with generators_kept():
                for turn, batch in zip(self._rounds, call.shards, strict=True):
                    shard = Shard.of(call, turn.own, is_audited=False)
                    if shard.samples:
                        self._buffers.open(first=not told)
                        with self._told(f"step {call.step}, shard {shard.number}"), elsewhere():
                            self._forward.compute(call, shard, batch)
                    report = shard.read()
                    told.append([report.loss, report.weight, *(further() if shard.samples else ())])
        finally:
            self._buffers.rewind()
        self._workers.tick()
        return [row for one in self._workers.gather_json(told) for row in one]

    def work_out(self, call: Call, attempt: Attempt) -> Callable[[], None] | None:
        """Work out the update of an attempt, on every worker alike. Collective; changes neither weights nor buffers.

        Returns:
            what makes the update, here; nothing where a step is skipped: its loss is NaN or infinite, with
            ``on_nan="skip"``.

        Raises:
            NonFiniteLoss: names step, shard and rank.
        """
        started = perf_counter()
        if trouble := self._trouble(call, attempt.report):
            self._refused(call, trouble)
            return None
        gradients, report = attempt.gradients, attempt.report
        used, used_buffers = report.used[: len(gradients.names)], report.used[len(gradients.names) :]
        changes = call.update is not None or any(map(may_change_gradients, call.optimizers))
        self._prepared.clear_gradients(but=gradients.parameters)  # or what this worker's last shard left would be seen
        gradients.assign(attempt.totals, report.weight, used, writable=changes or call.clip.limits)
        if gradients.is_watched:
            with self._or_rewound():
                attempt.norms = self._measured(call, gradients, report)
        norm = self._clipped(call, gradients)
        if not math.isfinite(norm):
            self._refused(call, f"the norm of the gradient is {norm}")
            return None
        if trouble := next(filter(None, (one.trouble() for one in sharing_in(call.optimizers))), ""):
            self._refused(call, trouble)
            return None
        counts = [len(call.batch.shard(shard)) for shard in range(call.batch.shards)]
        with self._or_rewound():
            buffers = self._buffers.reduced(self._workers.transport, used_buffers, counts)
            if call.update is None:
                with self._scaled(call.optimizers):
                    self._update.work_out(call.optimizers)
                    self._pieces.work_out(call.optimizers)

        keeps = self.cause(call)

        def make() -> None:
            set_places(buffers)
            if keeps is not None:
                parameters = self._prepared.reduced_for(call.optimizers)
                keeps.keep(attempt.report.loss, parameters, self._prepared.buffers, buffers)
            elif self._cause is not None:
                self._cause.let_go()
            with nullcontext() if call.update else self._scaled(call.optimizers):
                if call.update is None:
                    self._pieces.give(call.optimizers)
                    self._update.apply(call.optimizers)
                else:
                    self._make_own(call.update, call.optimizers, attempt)
                if self._at_rest is not None:
                    self._at_rest.note(self._update.sums())  # before others can read or write what it has updated
                self._update.finish()
            # Only now, when nobody reads it any more: so it was right whenever it was read.
            self.has_lost |= self._update.has_flipped
            self.has_lost |= not changes and not gradients.has_kept()
            if call.update is None:  # which leaves gradients as it wants to
                gradients.release(used)
            if self._cause is not None:
                self._body.committed()
            attempt.seconds["update"] = (ended := perf_counter()) - started
            if self._spans is not None:
                self._spans.add("update", started, ended)

        gradients.show()
        return make

    def cause(self, call: Call) -> UpdateCause | None:
        """What a worker that is behind needs to make the update of a call by itself, once it is made here."""
        is_needed = call.update is not None or (self._body.needs_cause and not self.bytes_shared)
        return self._cause if is_needed else None

    @property
    def is_written(self) -> bool:
        """Whether the script has changed since the last update what that has left."""
        return self._body.are_new or self._update.must_part()

    def _buffer_tensors(self) -> list[Tensor]:
        return [place.tensor for place in self._prepared.buffers]

    def _make_own(self, update: OwnUpdate, optimizers: Sequence[Optimizer], attempt: Attempt) -> None:
        """Let the script make the update, of weights that are this worker's own."""
        self.has_lost |= not attempt.gradients.has_kept()
        self._update.part()
        update.make(attempt.report.loss, optimizers, self._scaled)

    def _clipped(self, call: Call, gradients: Gradients) -> float:
        if not call.clip.limits:
            return 0.0
        self.has_lost |= not gradients.has_kept()
        norm = call.clip.apply(gradients.trained, self._slicing.norm if self._slicing else global_norm)
        gradients.keep()
        return norm

    def step_begins(self) -> None:
        """A step begins: from now on only updates and the script change the state."""
        if self._at_rest is not None:
            self._at_rest.first()

    @property
    def bytes_shared(self) -> int:
        """What the workers of this host keep together, once, instead of one by one: parameters and optimizer state."""
        return self._update.bytes_shared

    def in_memory(self, tensor: Tensor) -> Tensor:
        """A tensor of the script where it really lies: workers of a host may share that memory."""
        return self._update.in_memory(tensor)

    def require_whole(self) -> None:
        """Refuse weights that cannot be gone on from.

        Raises:
            WorkerLost: a worker was lost in the middle of an update, and the weights are half updated.
        """
        self._update.require_whole()

    @property
    def has_flipped(self) -> bool:
        """Whether a bit is not as the last update has left it, where this worker has the only copy."""
        return self._at_rest is not None and self._at_rest.has_changed()

    def close(self) -> None:
        """Let go of the model's parameters and of the thread."""
        self._update.close()
        self.has_lost |= self._update.has_flipped
        self._let_go()
        self._reducer.close()
        for gradients in self._gradients.values():
            gradients.remove()

    def log(self, name: str, value: float) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        return self._forward.log(name, value)

    @property
    def _split(self) -> Split:
        return self._workers.transport.split

    @property
    def _mine(self) -> range:
        return self._split.of(self._workers.rank)

    @property
    def _rounds(self) -> Sequence[Round]:
        return self._devices.rounds(self._mine)

    def _looking(self) -> AtRest:
        """What this worker looks at: where workers share the weights, each looks at its own part."""
        prepared, update = self._prepared, self._update
        weights, is_only = list(prepared.weights().values()), self._workers.world_size == 1
        if not isinstance(update, ShardedUpdate) or not update.is_shared:
            return AtRest(weights, self._buffers, state=partial(kept_by, prepared.optimizers), is_only=is_only)
        places = {id(weight): number for number, weight in enumerate(weights)}
        parts = [(places[id(parameter)], part) for parameter, part in update.parts]
        shared = {places[id(parameter)] for parameter in prepared.parameters.values()}
        return AtRest(weights, self._buffers, shared, parts, update.kept, is_only=True)

    def _let_go(self) -> None:
        """What this worker looks at may move: hold nothing of it."""
        self._writes.let_go()
        self._body.let_go()
        if self._at_rest is not None:
            self._at_rest.let_go()

    def _look_anew(self) -> None:
        """What this worker looks at lies in other memory now."""
        if self._at_rest is not None:
            self._at_rest = self._looking()

    def _resplit(self, split: Split) -> None:
        """Workers have other shards, or as many pieces of them: let go of all that was made for those before."""
        self._prepared.clear_gradients()
        for gradients in self._gradients.values():
            gradients.remove()
        self._gradients.clear()
        self._workers.transport.resplit(split)
        self._buffers = Buffers(self._prepared.buffers, self._split, self._workers.rank)
        if self._at_rest is not None:
            self._at_rest.buffers = self._buffers

    def _whole_attempt(self, call: Call, flags: Callable[[Seen], Flags]) -> Attempt:
        """The first attempt that counts. All workers repeat the others alike."""
        findings: tuple[AuditResult, ...] = ()
        for _ in range(1 + MOST_REPEATS):
            attempt = self._attempt(call, flags)
            attempt.findings = findings
            if attempt.report.written:
                self._update.part()  # then all compare what they have
            elif attempt.report.lost or judged(attempt.flags) is not Verdict.RIGHT:
                return attempt  # whoever computes with wrong weights is no worse a processor for that
            elif attempt.report.again:
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
        gradients.witness = self.witness
        gradients.watch(call.step if self._monitoring.watches(call.step, call.number) else None)
        started = perf_counter()
        gradients.begin(call.step)
        drawn = self._audit.drawn(call.step, call.number, call.batch, is_last=call.is_last)
        shards = [Shard.of(call, turn.own, is_audited=turn.own in drawn, counts=turn.counts) for turn in self._rounds]
        self._writes.begin()
        with generators_kept():
            if self._pipeline is not None:
                self._compute_stages(self._pipeline, call, gradients, shards)
            else:
                for turn, shard, batch in zip(self._rounds, shards, call.shards, strict=True):
                    self._compute(call, turn, shard, batch, gradients, shards)
                    self._workers.tick()
        with self._told(f"step {call.step}"):
            self._writes.require_none()
        if not shards:
            self._prepared.clear_gradients()
            gradients.serve(partial(self._weigh, call, []))
            self._workers.tick()
        call.computed(perf_counter() - started)
        computed = perf_counter()
        totals, reducing = gradients.totals()
        reduced = perf_counter()
        seen = Seen() if self._at_rest is None else self._at_rest.look()
        own = flags(seen)
        asked = perf_counter()
        report, told = self._exchange(gradients, shards, own)
        done = perf_counter()
        if self._spans is not None:
            self._spans.add("compute", started, computed)
            self._spans.add("exchange", asked, done)
            self._spans.add("exposed", computed, done)
        seconds = {
            "compute": computed - started,
            "exposed_communication": done - computed,
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
        drawn = self._audit.drawn(call.step, call.number, call.batch, is_last=call.is_last)
        again = partial(self._again, call, attempt.gradients)
        findings = self._audit.examine(call.step, drawn, attempt.marks, again)
        for finding in findings:
            self._found(finding)
        return findings

    def _again(self, call: Call, gradients: Gradients, number: int) -> str:
        """Compute a shard, of whichever worker, beside the attempt."""
        shard = Shard.of(call, number, is_audited=True)
        assert call.load is not None and shard.mark is not None, "what is audited can be loaded"  # noqa: PT018
        holders = self._prepared.gradient_holders()
        held = [parameter.grad for parameter in holders]
        with generators_kept(), self._buffers.aside() as made:
            self._prepared.clear_gradients()
            self._forward.compute(call, shard, call.load(number))
            if shard.report.weight:
                shard.backward(gradients.parameters)
            else:
                self._prepared.clear_gradients()
            for each, parameter in enumerate(gradients.parameters):
                shard.mark.take(each, parameter.grad)
            found = shard.mark.finish(shard.read(), made())
        for parameter, gradient in zip(holders, held, strict=True):
            parameter.grad = gradient
        self._workers.tick()
        return found

    def _compute(
        self, call: Call, turn: Round, shard: Shard, batch: Any, gradients: Gradients, shards: Sequence[Shard]
    ) -> None:
        self._prepared.clear_gradients()
        gradients.mark = shard.mark
        gradients.open(last=shard is shards[-1])
        with self._told(f"step {call.step}, shard {call.first + shard.number}"):
            if not shard.samples and self._devices.count > 1:  # passes are collective, so it takes part with another's
                assert call.load is not None, "the batch of any shard can be loaded"
                batch = call.load(0)
            if shard.samples or self._devices.count > 1:
                self._buffers.open(first=shard is shards[0])
                self._forward.compute(call, shard, batch)
                gradients.computed()
            if shard.samples and shard.counts:
                self._buffers.take(shard.number)
            shared_buffers(self._devices, turn, self._buffers)
            if shard is shards[-1]:
                gradients.send(partial(self._weigh, call, shared_weights(self._devices, self._rounds, shards)))
            if shard.report.weight or self._devices.count > 1:
                if not (shard.report.weight and shard.counts):
                    gradients.leave_out()
                begun = perf_counter()
                with gradients.listening():
                    shard.backward(gradients.parameters)
                if self._spans is not None:
                    self._spans.add("backward", begun, perf_counter(), shard.number)
            else:
                self._prepared.clear_gradients()
            gradients.close()
            if shard.report.weight:
                shard.report.squared_norm = gradients.squared_norm() / shard.report.weight**2

    def _compute_stages(self, pipeline: Pipeline, call: Call, gradients: Gradients, shards: Sequence[Shard]) -> None:
        """The devices of this worker compute all its shards together."""
        self._prepared.clear_gradients()
        with self._told(f"step {call.step}"):
            weights = pipeline.compute(call, shards, gradients, self._buffers, self._forward, self._workers.tick)
        gradients.send(partial(self._weigh, call, weights))
        pipeline.finish(gradients)

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        try:
            yield
        except (LossError, ModelError) as error:
            raise type(error)(f"{where}, rank {self._rank}: {error}") from error

    def _weigh(self, call: Call, weights: Sequence[float]) -> float | None:
        # What is compressed is divided only when it is wide again.
        weight = total_weight(self._workers.transport, weights, call.decided)
        return weight if self._job.compression == "none" else None

    def _exchange(
        self, gradients: Gradients, shards: Sequence[Shard], flags: Flags
    ) -> tuple[StepReport, tuple[Flags, ...]]:
        used: Sequence[bool] = [*gradients.used, *self._buffers.used]
        word = ControlWord(self._split, len(used))
        own = Balance(gradients.balance, gradients.copies)
        is_written = self._update.must_part()
        flags = replace(flags, again=gradients.came_twice, lost=self.has_lost, written=is_written, balance=own)
        reports, used, flags = shared_report(self._devices, self._rounds, [one.read() for one in shards], used, flags)
        words = word.open(self._workers.transport.all_gather(word.pack(reports, used, flags)))
        names = next((sorted(report.metrics) for report in reports if report.weight), None)
        logged = words.logged
        if logged is not None and words.has_silent_worker(self._split):
            if logged not in self._known:  # on any worker: all of them have seen the same
                everybody = self._workers.gather_json(names)
                self._known[logged] = next(known for known in everybody if known is not None)
            names = self._known[logged] if names is None else names
        return words.read(names or []), words.flags

    def _measured(self, call: Call, gradients: Gradients, report: StepReport) -> GradientNorms:
        seen = [(part, call.batch.shard(shard)) for shard, part in enumerate(report.shards) if part.weight]
        return GradientNorms(
            groups=[part.squared_norm for part, _ in seen],
            sizes=[len(samples) for _, samples in seen],
            mean=gradients.mean_squared_norm(),
        )

    @contextmanager
    def _or_rewound(self) -> Iterator[None]:
        """What is done in here is collective: if it fails, the step is computed again, and buffers are as it began."""
        try:
            yield
        except BaseException:
            self._buffers.rewind()
            raise

    def _trouble(self, call: Call, report: StepReport) -> str:
        if report.weight == 0:
            raise LossError(f"step {call.step}: all shards returned the weight 0, so there is no mean to follow")
        for shard, part in enumerate(report.shards):
            if part.weight and not math.isfinite(part.loss):
                rank = self._split.owner(shard) if self._workers.world_size > 1 else self._rank
                return f"the loss is {part.loss} in shard {call.first + shard} (rank {rank})"
        return ""

    def _refused(self, call: Call, trouble: str) -> None:
        self._buffers.rewind()
        self._prepared.clear_gradients()
        if self._job.on_nan == "skip":
            return
        raise NonFiniteLoss(
            f"step {call.step}: {trouble}; nothing was updated. Lower the learning rate, clip gradients, check the "
            f'data; or skip such steps with unisono.init(on_nan="skip")'
        )

    @property
    def _bucket_bytes(self) -> int:
        return int(self._job.bucket_mb * 2**20)

    def _gradients_of(self, call: Call) -> Gradients:
        reduced, trained = self._prepared.reduced_for(call.optimizers), self._prepared.trained_by(call.optimizers)
        strides = map(Tensor.stride, self._prepared.parameters.values())
        key = (*map(id, call.optimizers), len(reduced), *strides)
        if key not in self._gradients:
            require_agreement(self._workers.transport, call.decided)  # what follows is made together
            compressed = torch.bfloat16 if self._job.compression == "bf16" else None
            fusion = Fusion(self._bucket_bytes, compressed, self._checked_bytes)
            norms = SquaredNorms(len(trained), self._monitoring.blocks_of(trained.values()))
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
