"""The update of a step: worked out from its gradient on all workers, then made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.adapt.norms import GradientNorms
from unisono.device import HostRead, StreamMoment
from unisono.errors import LossError, NonFiniteLoss
from unisono.plan.audits import AuditResult
from unisono.plan.owners import owners_of
from unisono.train.group.control import Flags, StepReport
from unisono.train.group.workers import Workers
from unisono.train.model.own_update import OwnUpdate, Scaled
from unisono.train.model.places import set_places
from unisono.train.model.shared_work import Piece, SharingOptimizer
from unisono.train.model.update import Update, may_change_gradients
from unisono.train.state.loss_scale import LEAST
from unisono.train.step.gradients import Gradients
from unisono.train.step.owned_update import whole_update
from unisono.train.step.shard_passes import EngineBase
from unisono.train.step.step import Call
from unisono.train.step.tensor_trees import forms_of, row_of, size_of, tensors_in
from unisono.train.step.weights_watch import WeightsWatch


class SharedPieces:
    """Has each piece of work done by its owner, before anything changes, and given to all.

    Args:
        workers: the workers that share the work.
        least: the multiplications of a step from which on they do.
    """

    def __init__(self, workers: Workers, least: float) -> None:
        self._workers, self._least = workers, least
        self._found: dict[int, dict[int, Piece]] = {}

    @torch.no_grad()
    def work_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Work out all pieces of the next step of these optimizers. Collective; changes nothing."""
        self._found = {}
        for number, one in enumerate(optimizers):
            if isinstance(one, SharingOptimizer) and self._is_worth(costs := one.pieces()):
                self._found[number] = self._exchanged(one, owners_of(costs, self._workers.world_size))

    def give(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the optimizers have what was worked out, for the step that follows."""
        for number, one in enumerate(optimizers):
            if isinstance(one, SharingOptimizer):
                one.given = self._found.pop(number, {})

    def _is_worth(self, costs: Sequence[float]) -> bool:
        return self._workers.world_size > 1 and bool(costs) and sum(costs) >= self._least

    def _exchanged(self, optimizer: SharingOptimizer, owners: Sequence[int]) -> dict[int, Piece]:
        rank, ranks = self._workers.rank, range(self._workers.world_size)
        owned = [[piece for piece, owner in enumerate(owners) if owner == each] for each in ranks]
        # All know what has which form, so nobody has to tell.
        forms = [[forms_of(optimizer.forms(piece)) for piece in listed] for listed in owned]
        size = max(sum(map(size_of, listed)) for listed in forms)
        own = {piece: optimizer.worked_out(piece) for piece in owned[rank]}
        device = next((one.device for made in own.values() for one in made), torch.device("cpu"))
        rows = self._workers.transport.all_gather(row_of([one for made in own.values() for one in made], size, device))
        found = dict(own)
        for each in ranks:
            if each == rank:
                continue
            tensors = iter(tensors_in(rows[each], [form for listed in forms[each] for form in listed]))
            for piece, listed in zip(owned[each], forms[each], strict=True):
                found[piece] = [next(tensors).clone() for _ in listed]  # or each would keep all rows in memory
        return found


@dataclass(slots=True)
class Attempt:
    """A computed, not yet committed call.

    Norms of its gradients come with its update, if they are wanted; and so does the reason why there is none.
    """

    gradients: Gradients
    totals: tuple[Tensor, ...]
    report: StepReport
    flags: tuple[Flags, ...]
    seconds: dict[str, float]
    norms: GradientNorms | None = None
    marks: dict[int, str] = field(default_factory=dict)
    findings: tuple[AuditResult, ...] = ()
    trouble: str = ""
    overflows: bool = False


class StepUpdate:
    """Makes the updates of one generation.

    Args:
        base: the base of the engine.
        update: the update that is made with a step's gradient; by default the optimizers' own.
        norm_of: a function that returns the norm of all gradients of parameters together.
        scaled: a context manager that changes the optimizers' learning rates for an update.
        has_lost: whether an update was made earlier from a gradient that memory had not kept.
        survives: whether this worker goes on when others are lost.
        not_finite: a function that finds this worker's first shard whose gradient is not finite.

    Attributes:
        has_lost: whether such an update was made, here or earlier.
        watch: what this worker sees of its weights between two updates.
    """

    def __init__(
        self,
        base: EngineBase,
        update: Update | None,
        *,
        norm_of: Callable[[Sequence[Tensor]], Tensor],
        scaled: Scaled,
        has_lost: bool,
        survives: bool,
        not_finite: Callable[[Call, Gradients], tuple[int, int, float] | None],
    ) -> None:
        workers, prepared, buffers, execution = base.workers, base.prepared, base.buffers, base.execution
        self._not_finite, self._device = not_finite, workers.device
        self._last: tuple[StreamMoment, StreamMoment] | None = None
        self._job, self._workers, self._prepared, self._buffers = base.job, workers, prepared, buffers
        self._rank, self._norm_of, self._scaled, self._spans = base.rank, norm_of, scaled, base.spans
        self.has_lost = has_lost
        self._update = update or whole_update(prepared, workers, execution)
        self._pieces = SharedPieces(workers, execution.shared_from)
        self.watch = WeightsWatch(
            prepared, buffers, is_only=workers.world_size == 1, looks=execution.looks, survives=survives
        )

    def begin(self) -> None:
        """A call is about to be computed."""
        self.watch.call_begins()
        self._buffers.begin()
        self.watch.attempt_begins()

    def work_out(self, call: Call, attempt: Attempt) -> Callable[[], None] | None:
        """Work out the update of an attempt, on every worker alike. Collective; changes neither weights nor buffers.

        Returns:
            what makes the update, here; nothing where a step is skipped: its loss is NaN or infinite, with
            ``on_nan="skip"``, or by a fault of the memory that the watch tells of.

        Raises:
            NonFiniteLoss: names step, shard and rank, and the parameter whose gradient it is.
        """
        started = StreamMoment(self._device)
        if trouble := self._trouble(call, attempt):
            self._refused(call, attempt, trouble)
            return None
        gradients, report = attempt.gradients, attempt.report
        used, used_buffers = report.used[: len(gradients.names)], report.used[len(gradients.names) :]
        changes = call.update is not None or any(map(may_change_gradients, call.optimizers))
        self._prepared.clear_gradients(but=gradients.parameters)  # or what this worker's last shard left would be seen
        gradients.assign(attempt.totals, report.weight * call.scale, used, writable=changes or call.clip.limits)
        self.has_lost |= call.scale != 1.0 and not gradients.has_kept()
        gradients.unscale(call.scale)
        if gradients.is_watched:
            with self._or_rewound():
                attempt.norms = _norms_of(call, gradients, report)
        norm = self._clipped(call, gradients)
        counts = [len(call.batch.shard(shard)) for shard in range(call.batch.shards)]
        with self._or_rewound():
            buffers = self._buffers.reduced(self._workers.transport, used_buffers, counts)
            self.has_lost |= not self._buffers.have_kept
            if call.update is None:
                with self._scaled(call.optimizers):
                    self._update.work_out(call.optimizers)
                    self._pieces.work_out(call.optimizers)
            self._workers.transport.settle()
            self._workers.devices.settle()

        gradients.show()  # before the last look, which is to find what flips then
        self.watch.look_last()
        if norm is not None and not math.isfinite(length := float(norm.values())):
            self._refused(call, attempt, f"the norm of the gradient is {length}")
            return None
        cause = self.watch.cause(call)

        def make() -> None:
            set_places(buffers)
            self.watch.keep(cause, call, attempt.report.loss, buffers)
            with nullcontext() if call.update else self._scaled(call.optimizers):
                if call.update is None:
                    self._pieces.give(call.optimizers)
                    self._update.apply(call.optimizers)
                else:
                    self._make_own(call.update, call.optimizers, attempt)
                self.watch.note()
            # Only now, when nobody reads it any more: so it was right whenever it was read.
            self.has_lost |= not changes and not gradients.has_kept()
            if call.update is None:  # which leaves gradients as it wants to
                gradients.release(used)
            self.watch.committed()
            ended = StreamMoment(self._device)
            # A device is not waited for: it has told by now how long the update before took.
            begun, done = (started, ended) if ended.is_over else self._last or (started, ended)
            attempt.seconds["update"], self._last = begun.seconds_to(done), (started, ended)
            if self._spans is not None:
                self._spans.add("update", started.host_s, ended.host_s)

        return make

    def require_finite(self, call: Call, attempt: Attempt) -> None:
        """Refuse an attempt that is not to be updated from; gradients are cleared. Collective.

        Raises:
            NonFiniteLoss: names step, shard and rank.
        """
        if trouble := self._trouble(call, attempt):
            self._prepared.clear_gradients()
            raise NonFiniteLoss(f"step {call.step}: {trouble}")

    def _make_own(self, update: OwnUpdate, optimizers: Sequence[Optimizer], attempt: Attempt) -> None:
        """Let the script make the update."""
        self.has_lost |= not attempt.gradients.has_kept()
        update.make(attempt.report.loss, optimizers, self._scaled)

    def _clipped(self, call: Call, gradients: Gradients) -> HostRead | None:
        """Limit the gradients; returns their norm, if that is limited, for which nobody has waited."""
        if not call.clip.limits:
            return None
        self.has_lost |= not gradients.has_kept()
        norm = call.clip.apply(gradients.trained, self._norm_of)
        gradients.keep()
        return None if norm is None else HostRead(norm)

    @contextmanager
    def _or_rewound(self) -> Iterator[None]:
        """What is done in here is collective: if it fails, the step is computed again, and buffers are as it began."""
        try:
            yield
        except BaseException:
            self._buffers.rewind()
            raise

    def _trouble(self, call: Call, attempt: Attempt) -> str:
        report = attempt.report
        if report.weight == 0:
            raise LossError(f"step {call.step}: all shards returned the weight 0, so there is no mean to follow")
        for shard, part in enumerate(report.shards):
            if part.weight and not math.isfinite(part.loss):
                rank = self._workers.transport.split.owner(shard) if self._workers.world_size > 1 else self._rank
                return f"the loss is {part.loss} in shard {call.first + shard} (rank {rank})"
        if report.told.diverges and self._backs_off(call):
            attempt.overflows = True
            return f"float16 overflows at the loss scale {call.scale:g}"
        if report.told.diverges:
            with self._or_rewound():
                return self._where_not_finite(call, attempt)
        return ""

    def _where_not_finite(self, call: Call, attempt: Attempt) -> str:
        """What of the gradient is not finite: the parameter and the shard, which is computed again. Collective."""
        workers, gradients = self._workers, attempt.gradients
        found = workers.devices.gather(_named(gradients, gradients.not_finite(attempt.totals)))
        told = "{} is {} in {}".format
        name, value = next(filter(None, found), ("the gradient", "not finite"))
        shards = f"shards {call.first} to {call.first + call.batch.shards - 1}"
        if workers.devices.count > 1:  # which compute shards together, or in turns
            return told(name, value, f"one of {shards}")
        own = self._not_finite(call, gradients)
        everybody = workers.gather_json(own and [own[0], *(_named(gradients, own[1:]) or ())])
        for rank, one in enumerate(everybody):
            if one is not None:
                shard, name, value = one
                owner = rank if workers.world_size > 1 else self._rank
                return told(name, value, f"shard {call.first + shard} (rank {owner})")
        return told(name, value, f"the sum of {shards}, though it is finite in each of them")

    def _refused(self, call: Call, attempt: Attempt, trouble: str) -> None:
        self._buffers.rewind()
        self._prepared.clear_gradients()
        attempt.trouble = trouble
        if attempt.overflows or self._job.on_nan == "skip" or self._is_faulty():
            return
        hint = "" if call.update is None else "A torch.amp.GradScaler is for precision='fp16' to replace. "
        if self._job.precision == "fp16" and attempt.report.told.diverges:
            hint = f"No loss scale down to {LEAST:g} keeps float16 from overflowing. "
        raise NonFiniteLoss(
            f"step {call.step}: {trouble}; nothing was updated. {hint}Lower the learning rate, clip gradients, "
            f"check the data; or skip such steps with unisono.init(arithmetic={{'on_nan': 'skip'}}). Steps are exact: "
            "if this does not "
            f"come again from an older checkpoint, a bit has flipped, and the memory of the hosts wants a test"
        )

    def _backs_off(self, call: Call) -> bool:
        """Whether a step that is not finite is skipped, and the next one has a smaller loss scale."""
        return self._job.precision == "fp16" and call.scale > LEAST

    def _is_faulty(self) -> bool:
        """Whether one worker's memory is to blame for what was computed, as it says next."""
        return self.watch.looks_last and (self.has_lost or self.watch.has_flipped)


def _named(gradients: Gradients, found: tuple[int, float] | None) -> tuple[str, str] | None:
    if found is None:
        return None
    number, value = found
    what = "gradient of" if number < len(gradients.trained) else "sum of the"  # statistics
    return f"the {what} {gradients.names[number]}", str(value)


def _norms_of(call: Call, gradients: Gradients, report: StepReport) -> GradientNorms:
    seen = [(part, call.batch.shard(shard)) for shard, part in enumerate(report.shards) if part.weight]
    return GradientNorms(
        groups=[part.squared_norm for part, _ in seen],
        sizes=[len(samples) for _, samples in seen],
        mean=gradients.mean_squared_norm(),
    )
