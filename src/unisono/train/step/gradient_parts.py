"""Parts of a step that look at gradients: each came whole, all are finite, memory kept them; their norms and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

from torch import Tensor

from unisono.adapt.norms import GradientNorms, Monitoring
from unisono.device import HostRead
from unisono.errors import LossError, NonFiniteLoss, UpdateRefused
from unisono.reduce.partial_sums import PRIME, is_balanced
from unisono.train.state.trained import LEAST, LossScale, Trained
from unisono.train.step.gradients import Gradients
from unisono.train.step.part import Attempt, EngineBase, Hearing, Part
from unisono.train.step.shard_passes import ShardPasses
from unisono.train.step.word import Field
from unisono.words import MODULUS


class WholeGradients(Part):
    """Has an attempt repeated if a gradient came in several parts, since its sums are wrong then."""

    fields = (Field("again"),)
    measures = True

    def tell(self, attempt: Attempt) -> tuple[bool]:
        """Whether a gradient of this worker's came in several parts."""
        return (attempt.gradients.came_twice,)

    def hear(self, attempt: Attempt, again: bool) -> Hearing | None:
        """Take gradients after each backward pass from now on, and repeat the attempt, if one came in several parts."""
        if not again:
            return None
        attempt.gradients.stop_listening()
        return Hearing.AGAIN


class FiniteSums(Part):
    """Refuses an update from a loss or a gradient that is not finite."""

    fields = (Field("diverges"),)
    measures = True

    def __init__(self, base: EngineBase, loss_scale: LossScale | None, passes: ShardPasses) -> None:
        self._base, self._loss_scale, self._passes = base, loss_scale, passes
        self._are_finite: Callable[[], bool] = lambda: True
        self._diverges = False

    def ask(self, attempt: Attempt) -> None:
        """Ask whether the sums that this worker has finished are finite."""
        self._are_finite = attempt.gradients.checks.are_finite()

    def tell(self, attempt: Attempt) -> tuple[bool]:
        """Whether some of them are not finite."""
        return (not self._are_finite(),)

    def hear(self, attempt: Attempt, diverges: bool) -> None:
        """Note whether some sums of any worker are not finite."""
        self._diverges = diverges

    def trouble(self, attempt: Attempt) -> str:
        """The loss or gradient that is not finite, in words; empty if all are finite. Collective.

        Raises:
            LossError: all shards have the weight 0.
        """
        call, report = attempt.call, attempt.report
        if report.weight == 0:
            raise LossError(f"step {call.step}: all shards returned the weight 0, so there is no mean to follow")
        if not self._diverges and math.isfinite(report.loss):
            return ""
        for shard, part in enumerate(report.shards):
            if part.weight and not math.isfinite(part.loss):
                return f"the loss is {part.loss} in shard {call.first + shard} (rank {self._owner(shard)})"
        if not self._diverges:
            return ""
        if self._loss_scale is not None and call.scale > LEAST:  # no error: the next step has a smaller loss scale
            attempt.overflows = True
            return f"float16 overflows at the loss scale {call.scale:g}"
        return self._where(attempt)

    def gradient(self, attempt: Attempt) -> None:
        """Divide gradients by the loss scale, if they are not sums, which are divided by it anyway."""
        if (scale := attempt.call.scale) != 1.0:
            attempt.parts.rewrite(attempt)
            attempt.gradients.unscale(scale)

    def note(self, attempt: Attempt) -> None:
        """Adjust the loss scale."""
        if self._loss_scale is not None and not attempt.trouble:
            self._loss_scale.updated()
        elif self._loss_scale is not None and attempt.overflows:
            self._loss_scale.overflowed()

    def left_out(self, attempt: Attempt, trouble: str) -> None:
        """Leave out the update of an attempt, for trouble in words: skip the step, or raise an error.

        Raises:
            NonFiniteLoss: names step, shard and rank, and the parameter whose gradient is not finite.
            UpdateRefused: a part of the script refuses the update.
        """
        job, attempt.trouble = self._base.job, trouble
        self._base.buffers.rewind()
        self._base.prepared.clear_gradients()
        if attempt.overflows or job.on_nan == "skip" or attempt.parts.is_faulty():
            return
        if attempt.refused:
            raise UpdateRefused(
                f"step {attempt.call.step}: {trouble}; nothing was updated. With "
                f"unisono.init(arithmetic={{'on_nan': 'skip'}}) such steps are skipped"
            )
        hint = "" if attempt.call.update is None else "A torch.amp.GradScaler is for precision='fp16' to replace. "
        if self._loss_scale is not None and self._diverges:
            hint = f"No loss scale down to {LEAST:g} keeps float16 from overflowing. "
        raise NonFiniteLoss(
            f"step {attempt.call.step}: {trouble}; nothing was updated. {hint}Lower the learning rate, clip gradients, "
            f"check the data; or skip such steps with unisono.init(arithmetic={{'on_nan': 'skip'}}). If the same "
            f"error does not occur again from an older checkpoint, a bit has flipped: test the memory of the hosts"
        )

    def require(self, attempt: Attempt) -> None:
        """Refuse an attempt whose loss or gradient is not finite, and delete its gradients. Collective.

        Raises:
            NonFiniteLoss: names step, shard and rank.
        """
        if trouble := self.trouble(attempt):
            self._base.prepared.clear_gradients()
            raise NonFiniteLoss(f"step {attempt.call.step}: {trouble}")

    def _owner(self, shard: int) -> int:
        return self._base.rank if self._base.is_only else self._base.workers.transport.split.owner(shard)

    def _where(self, attempt: Attempt) -> str:
        """The parameter whose gradient is not finite, and the shard, found by computing shards again. Collective."""
        gradients, call = attempt.gradients, attempt.call
        in_sums = self._passes.first_of_devices(_named(gradients, gradients.not_finite(attempt.totals)))
        text = "{} is {} in {}".format
        name, value = in_sums or ("the gradient", "not finite")
        own = self._passes.not_finite(call, gradients)
        findings = self._base.workers.gather_json(own and [own[0], *(_named(gradients, own[1:]) or ())])
        if (first := next(filter(None, findings), None)) is not None:
            shard, name, value = first
            return text(name, value, f"shard {call.first + shard} (rank {self._owner(shard)})")
        shards = f"shards {call.first} to {call.first + call.batch.shards - 1}"
        return text(name, value, self._passes.unfound.format(shards))


def _named(gradients: Gradients, entry: tuple[int, float] | None) -> tuple[str, str] | None:
    if entry is None:
        return None
    number, value = entry
    what = "gradient of" if number < len(gradients.trained) else "sum of the"  # statistics
    return f"the {what} {gradients.names[number]}", str(value)


class MemoryChecks(Part):
    """Has a step repeated if its partial sums were not read as they were written; see :class:`Tally`.

    Args:
        repeats: a function that is called with the step's number before that.

    Attributes:
        has_lost: whether an update was made from a gradient whose bits had changed in memory.
    """

    fields = (
        Field("balance", "Q", "sum", modulus=MODULUS),
        Field("copies", "Q", "sum", modulus=PRIME),
    )

    measures = True

    def __init__(self, repeats: Callable[[int], None] = lambda step: None) -> None:
        self._repeats = repeats
        self.has_lost = False

    def join(self, base: EngineBase) -> None:
        """Note whether this is the only worker, which has to check its memory before the update."""
        self._is_only, self._buffers = base.is_only and base.execution.looks, base.buffers

    def tell(self, attempt: Attempt) -> tuple[int, int]:
        """The words that this worker wrote, less those that it read."""
        return (checks := attempt.gradients.checks).balance % MODULUS, checks.copies % PRIME

    def hear(self, attempt: Attempt, balance: int, copies: int) -> Hearing | None:
        """Repeat the attempt unless the workers' differences add up to zero, as they do if memory kept everything."""
        if is_balanced([balance], [copies]):
            return None
        self._repeats(attempt.call.step)
        return Hearing.AGAIN

    def rewrite(self, attempt: Attempt) -> None:
        """Check the gradient before it is changed, since it cannot be checked afterwards."""
        self.has_lost |= not attempt.gradients.checks.has_kept()

    def work_out(self, attempt: Attempt) -> None:
        """Note whether the shards' results for buffers, which were just combined, had kept their bits."""
        self.has_lost |= not self._buffers.have_kept

    def is_faulty(self) -> bool:
        """Whether this worker is the only one, and used a gradient whose bits had changed."""
        return self._is_only and self.has_lost

    def apply(self, attempt: Attempt) -> None:
        """Check the gradient before an update of the script's own, which may change it."""
        if attempt.call.update is not None:
            self.rewrite(attempt)

    def done(self, attempt: Attempt) -> None:
        """Check the gradient after its last use: if it is right now, it was right whenever it was read."""
        if not attempt.changes:
            self.rewrite(attempt)


# Norms of gradients: clipping, and the measurement of noise.


class Clipping(Part):
    """Limits the gradient's norm and values, see :class:`~unisono.train.step.step.Clip`.

    ``norm_of`` returns the norm of all gradients together.
    """

    writes_gradient = True

    def __init__(self, norm_of: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self._norm_of = norm_of
        self._norm: HostRead | None = None

    def gradient(self, attempt: Attempt) -> None:
        """Limit the gradient, without waiting for its norm."""
        norm = attempt.call.clip.apply(attempt.gradients.trained, self._norm_of)
        self._norm = None if norm is None else HostRead(norm)

    def refuse(self, attempt: Attempt) -> str:
        """Refuse a gradient whose norm is not finite."""
        norm = 0.0 if self._norm is None else float(self._norm.values())
        return "" if math.isfinite(norm) else f"the norm of the gradient is {norm}"


class NoiseMonitor(Part):
    """Measures the norms of the shards' gradients and of their mean."""

    def __init__(self, monitoring: Monitoring, trained: Trained) -> None:
        self._monitoring, self._trained = monitoring, trained

    def attempt(self, attempt: Attempt) -> None:
        """Have the norms of the shards' gradients measured, if the step is watched."""
        call = attempt.call
        attempt.gradients.watch(call.step if self._monitoring.watches(call.step, call.number) else None)

    def gradient(self, attempt: Attempt) -> None:
        """Measure the norm of the mean gradient. Collective."""
        if not attempt.gradients.is_watched:
            return
        batch, shards = attempt.call.batch, attempt.report.shards
        measured = [(part, batch.shard(shard)) for shard, part in enumerate(shards) if part.weight]
        attempt.norms = GradientNorms(
            groups=[part.squared_norm for part, _ in measured],
            sizes=[len(samples) for _, samples in measured],
            mean=attempt.gradients.mean_squared_norm(),
        )

    def done(self, attempt: Attempt) -> None:
        """Add the norms to the figures of the step."""
        if attempt.norms is not None:
            losses = [part.loss for part in attempt.report.shards if part.weight]
            attempt.figures |= self._trained.monitors.see(attempt.call.step, attempt.norms, losses)
            if not self._trained.policy_state.is_empty:
                attempt.figures["norms"] = asdict(attempt.norms)
