"""Computes steps: this worker's shards, the reduction, the update."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.data.streams import generators_kept, seed_generators
from unisono.errors import LossError, ModelError, NondeterministicOperation, NonFiniteLoss
from unisono.job import Job
from unisono.plan.batches import Batch
from unisono.plan.streams import Stream, stream_seed
from unisono.reduce.reduction import REDUCTIONS
from unisono.train.buffers import Buffers
from unisono.train.control import ControlWord, ShardReport, StepReport
from unisono.train.gradients import Gradients
from unisono.train.loss import WeightedLoss
from unisono.train.prepared import Prepared
from unisono.train.workers import Workers

LossFunction = Callable[[Any, Any], Any]
"""``loss_fn(model, batch) -> loss`` or ``-> (loss, weight)``."""


@dataclass(frozen=True, slots=True)
class Clip:
    """How the step's gradient is limited before the update: by global norm, by value, or not at all."""

    norm: float | None = None
    value: float | None = None

    def apply(self, parameters: Sequence[Tensor]) -> float:
        """Limit the parameters' gradients in place; returns their global norm if it is limited, else 0."""
        norm = 0.0
        if self.norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.norm))
        if self.value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self.value)
        return norm


@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``step.run``: everything that decides its result, so that it can be computed again.

    Attributes:
        step: the step's number in the job.
        number: of the call within the step, 0 for the first.
        batch: the global batch.
        shards: the batches of this worker's shards; None for an empty one.
        loss_fn: as given.
        optimizers: which of the optimizers the call updates with.
        clip: how the gradient is limited.
    """

    step: int
    number: int
    batch: Batch
    shards: Sequence[Any]
    loss_fn: LossFunction
    optimizers: tuple[Optimizer, ...]
    clip: Clip


@dataclass(slots=True)
class Attempt:
    """A computed, not yet committed call."""

    gradients: Gradients
    totals: tuple[Tensor, ...]
    report: StepReport
    seconds: dict[str, float] = field(default_factory=dict)


class StepEngine:
    """Computes and commits the calls of one generation."""

    def __init__(self, job: Job, workers: Workers, prepared: Prepared, device: torch.device) -> None:
        self._job = job
        self._workers = workers
        self._prepared = prepared
        self._device = device
        self._mine = workers.generation.shards
        self._buffers = Buffers(prepared.buffers, workers.generation.split, workers.rank)
        self._gradients: dict[tuple[int, ...], Gradients] = {}
        self._shard: ShardReport | None = None

    def attempt(self, call: Call, *, leave: bool = False) -> Attempt:
        """Compute this worker's shards and reduce. Changes no weight: it can be done again.

        Args:
            call: what to compute.
            leave: this worker was asked to leave; rides with the control word.

        Raises:
            LossError, ModelError, NondeterministicOperation: the user's loss function or model; names the shard.
            WorkerLost: another worker is gone.
        """
        self._buffers.begin()
        try:
            return self._attempt(call, leave=leave)
        except BaseException:
            self._buffers.rewind()  # or the next attempt would start from what this one left
            raise

    def commit(self, call: Call, attempt: Attempt) -> bool:
        """Apply the update, on every worker alike.

        Returns:
            whether it was applied: a step whose loss is NaN or infinite is skipped with ``on_nan="skip"``.

        Raises:
            NonFiniteLoss: names step, shard and rank.
        """
        if trouble := self._trouble(call, attempt.report):
            return self._refused(call, trouble)
        used = attempt.report.used
        parameters = len(attempt.gradients.names)
        attempt.gradients.assign(attempt.totals, attempt.report.weight, used[:parameters])
        norm = call.clip.apply(attempt.gradients.parameters)
        if not math.isfinite(norm):
            return self._refused(call, f"the norm of the gradient is {norm}")
        counts = [len(call.batch.shard(shard)) for shard in range(self._job.shards)]
        self._buffers.finish(self._workers.transport, used[parameters:], counts)
        for optimizer in call.optimizers:
            optimizer.step()
        return True

    def log(self, name: str, value: float) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        if self._shard is None:
            return False
        self._shard.metrics[name] = value
        return True

    def _attempt(self, call: Call, *, leave: bool) -> Attempt:
        started = perf_counter()
        gradients = self._gradients_of(call.optimizers)
        gradients.begin()
        with generators_kept():
            reports = [self._compute(call, shard, gradients) for shard in self._mine]
        computed = perf_counter()
        totals = gradients.reduce(REDUCTIONS[self._job.reduction])
        report = self._exchange(gradients, reports, leave)
        done = perf_counter()
        return Attempt(gradients, totals, report, {"compute": computed - started, "communication": done - computed})

    def _compute(self, call: Call, shard: int, gradients: Gradients) -> ShardReport:
        samples = len(call.batch.shard(shard))
        report = ShardReport()
        self._clear_gradients()
        if samples:
            if shard != self._mine.start:  # the first one finds them as the step began
                self._buffers.rewind()
            seed_generators(stream_seed(self._job.seed, Stream.SHARD, call.step, call.number, shard))
            self._shard = report
            try:
                self._forward_backward(call, call.shards[shard - self._mine.start], samples, report)
            except (LossError, ModelError) as error:
                raise type(error)(f"step {call.step}, shard {shard}, rank {self._workers.rank}: {error}") from error
            finally:
                self._shard = None
            self._buffers.take(shard)
        gradients.take()
        return report

    def _forward_backward(self, call: Call, batch: Any, samples: int, report: ShardReport) -> None:
        with self._autocast(), _explained():
            returned = call.loss_fn(self._prepared.model, batch)
        weighted = WeightedLoss.of(returned, samples)
        report.loss = float(weighted.loss.detach())
        # With one shard the weight cancels out, and without it the bits are those of the plain loop.
        report.weight = 1.0 if self._job.shards == 1 and weighted.weight else weighted.weight
        if report.weight == 0:
            self._clear_gradients()
            return
        with _explained():
            (weighted.loss * report.weight if report.weight != 1.0 else weighted.loss).backward()

    def _exchange(self, gradients: Gradients, reports: Sequence[ShardReport], leave: bool) -> StepReport:
        used = [*gradients.used, *self._buffers.used]
        word = ControlWord(self._workers.generation.split, len(used))
        words = self._workers.transport.all_gather(word.pack(reports, used, leave))
        names = next((sorted(report.metrics) for report in reports if report.weight), None)
        if word.has_silent_worker(words):
            names = next((known for known in self._workers.gather_json(names) if known is not None), None)
        return word.read(words, names or [])

    def _trouble(self, call: Call, report: StepReport) -> str:
        if report.weight == 0:
            raise LossError(f"step {call.step}: all shards returned the weight 0, so there is no mean to follow")
        for shard, part in enumerate(report.shards):
            if part.weight and not math.isfinite(part.loss):
                return f"the loss is {part.loss} in shard {shard} (rank {self._workers.generation.split.owner(shard)})"
        return ""

    def _refused(self, call: Call, trouble: str) -> bool:
        self._buffers.rewind()
        self._clear_gradients()
        if self._job.on_nan == "skip":
            return False
        raise NonFiniteLoss(
            f"step {call.step}: {trouble}; nothing was updated. Lower the learning rate, clip gradients, check the "
            f'data; or skip such steps with unisono.init(on_nan="skip")'
        )

    def _gradients_of(self, optimizers: Sequence[Optimizer]) -> Gradients:
        key = tuple(map(id, optimizers))
        if key not in self._gradients:
            bucket_bytes = int(self._job.bucket_mb * 2**20)
            self._gradients[key] = Gradients(
                self._prepared.trained_by(optimizers), self._workers.transport, bucket_bytes
            )
        return self._gradients[key]

    def _clear_gradients(self) -> None:
        for parameter in self._prepared.parameters.values():
            parameter.grad = None

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._job.precision == "bf16")


class _explained:  # noqa: N801  a context manager, named like one
    """Turns torch's refusals into errors that say how to go on."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        text = str(error)
        if isinstance(error, ValueError) and "more than 1 value per channel" in text:
            raise ModelError(
                "BatchNorm got a shard of a single sample, most likely of a last, smaller batch: leave that out with "
                "run.steps(…, drop_last=True), or use a batch_size that leaves a larger rest"
            ) from error
        if isinstance(error, RuntimeError) and "deterministic" in text and "use_deterministic_algorithms" in text:
            operation = text.split(" ", 1)[0]
            raise NondeterministicOperation(
                f"{operation} has no deterministic implementation on this device, so the same job could end in other "
                f"bits: replace the operation, or accept that: unisono.init(deterministic=False). torch says: {text}"
            ) from error
