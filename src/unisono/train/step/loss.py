"""A shard's loss and weight, and what the shards of a step weigh together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from unisono.data.streams import seed_generators
from unisono.device import HostRead
from unisono.errors import JobError, LossError, ModelError, NondeterministicOperation, PolicyError
from unisono.job import Job
from unisono.plan.order import Stream, stream_seed
from unisono.plan.tree import Node
from unisono.received import short
from unisono.reduce.transport import Transport
from unisono.spans import Spans
from unisono.train.config.numerics import autocast
from unisono.train.group.control import ShardReport
from unisono.train.model.prepared import Prepared
from unisono.train.step.audit import ShardDigest
from unisono.train.step.step import Call

# What all shards of a step weigh together, and whether all workers' policies have decided alike before it.

_MOST = 64
"""Partial sums of one worker: two for each level of the summation tree at most."""


def total_weight(transport: Transport, weights: Sequence[float], decided: int = 0) -> float:
    """The sum of the weights of all shards, along the summation tree. Collective.

    What travels is of one size, whatever was decided. So workers whose policies have decided differently find out here,
    before anything travels whose size or way depends on it.

    Args:
        transport: the transport between the workers.
        weights: the weights of this worker's shards, in order.
        decided: a digest, below 2**53, of what this worker's policies decided before the step.

    Raises:
        PolicyError: workers have other digests, or other numbers of shards.
    """
    tree, split = transport.tree, transport.split
    covers = [tree.cover(split.of(rank).start, split.of(rank).stop) for rank in range(split.workers)]
    leaves = {Node(shard, shard + 1): weight for shard, weight in zip(split.of(transport.rank), weights, strict=True)}
    partials = [tree.finish(leaves, _add, node) for node in covers[transport.rank]]
    rows = _exchanged(transport, decided, partials)
    told = (zip(cover, row, strict=False) for cover, row in zip(covers, rows, strict=True))
    return tree.finish({node: value for one in told for node, value in one}, _add)


def require_agreement(transport: Transport, decided: int) -> None:
    """Refuse to go on with workers that decided otherwise. Collective; meets :func:`total_weight` of the others.

    Raises:
        PolicyError: workers have other digests, or other numbers of shards.
    """
    _exchanged(transport, decided, [])


def _exchanged(transport: Transport, decided: int, partials: Sequence[float]) -> list[list[float]]:
    row = torch.zeros(2 + _MOST, dtype=torch.float64)
    row[: 2 + len(partials)] = torch.tensor([transport.split.shards, decided, *partials], dtype=torch.float64)
    rows = transport.all_gather(row).tolist()
    if any(one[:2] != rows[0][:2] for one in rows):
        listed = ", ".join(f"rank {rank}: {int(one[0])}" for rank, one in enumerate(rows))
        raise PolicyError(f"the workers' policies decided differently; they have numbers of shards ({listed})")
    return [one[2:] for one in rows]


def _add(left: float, right: float) -> float:
    return left + right


# What a loss function may return, and what is made of it.


@dataclass(frozen=True, slots=True)
class Weighted:
    """What a loss function returns whose mean is not over samples; and a metric of an evaluation likewise.

    Attributes:
        loss: the shard's mean loss, a tensor with one element; or the mean of a metric, a number.
        weight: the number of samples, or of tokens, that it is the mean of: 0, or from 1e-30 to 1e30.
    """

    loss: Tensor | float
    weight: Tensor | float


@dataclass(frozen=True, slots=True)
class BackwardDone:
    """What a loss function returns that went backward by itself: its gradients are taken as they are.

    They lie in ``parameter.grad``, and are those of the mean over the shard's samples (or over what ``weight`` counts):
    all that it has accumulated there, in however many backward passes. They are multiplied by the weight, added up over
    all shards, and divided by the sum of the weights.

    Attributes:
        loss: the shard's mean loss: a number, or a tensor with one element.
        weight: the number of samples, or of tokens, that it is the mean of; by default the shard's number of samples.
        scale: the factor of the loss that it went backward from: 1, or the run's with ``precision="fp16"``.
    """

    loss: Tensor | float
    weight: Tensor | float | None = None
    scale: float = 1.0


def read_loss(returned: Any, samples: int) -> tuple[Tensor, float]:
    """The loss and the weight that a loss function returned: a loss, :class:`Weighted` or :class:`BackwardDone`.

    Args:
        returned: the value that the loss function returned.
        samples: the number of samples: the weight, unless one was returned.

    Raises:
        LossError: the loss is no scalar that depends on a parameter, or the weight is neither 0 nor between 1e-30 and
            1e30.
    """
    loss, weight = (
        (returned.loss, returned.weight) if isinstance(returned, Weighted | BackwardDone) else (returned, samples)
    )
    if has_gradients := isinstance(returned, BackwardDone):
        loss = torch.as_tensor(loss).detach() if isinstance(loss, Tensor | Real) else loss
        weight = samples if weight is None else weight
    if not isinstance(loss, Tensor):
        kind = "nothing" if loss is None else f"a {type(loss).__name__}"
        raise LossError(f"the loss function returned {kind}: return the loss alone, a scalar tensor. {_INSTEAD}")
    if loss.numel() != 1:
        raise LossError(
            f"the loss function returned a tensor of shape {list(loss.shape)}: return one number, the mean over "
            f"the shard's samples, for instance loss.mean()"
        )
    if loss.layout != torch.strided or loss.is_complex() or loss.is_meta:
        kind = f"{str(loss.dtype).removeprefix('torch.')}, {str(loss.layout).removeprefix('torch.')}, {loss.device}"
        raise LossError(f"the loss function returned a tensor that is no real number: {kind}")
    number = as_number(weight)
    if number is None or not (number == 0 or 1e-30 <= number <= 1e30):  # so that neither it nor its square overflows
        raise LossError(
            f"the loss function returned the weight {short(weight)}: it counts samples or tokens, so it is >= 0; "
            f"unless it is 0, it is at least 1e-30 and at most 1e30"
        )
    if not loss.requires_grad and not has_gradients and number != 0:
        raise LossError("the loss depends on no parameter: was it detached, or computed under no_grad?")
    return loss.reshape(()), number


_INSTEAD = (
    "If the mean is over tokens, say, instead of samples, return unisono.Weighted(loss, tokens); log a metric by "
    "run.log(name, value), and return the loss"
)
"""What to write in place of a loss function's tuple, list or dict."""


def as_number(value: Any) -> float | None:
    """A number, or a tensor or array that holds a single one, as a float; None for anything else."""
    if isinstance(value, str | bytes | bytearray) or (isinstance(value, Tensor) and value.numel() != 1):
        return None
    try:
        return float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError):  # too large, or a tensor without a value, say
        return None


# One shard, forward and backward.

_EXACT_AS_FLOAT32 = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(slots=True)
class Shard:
    """A shard of this worker while the step is computed.

    Attributes:
        number: the number of the shard in the batch.
        samples: the number of its samples; 0 for an empty one.
        report: what it comes to.
        loss: the mean loss, once it is computed.
        has_gradients: whether the loss function went backward by itself.
        own_scale: the factor of the loss that it went backward from.
        mark: the digest of its gradients, if it is audited.
        counts: whether what comes of it here counts: not where another device of the worker computes it as well.
        scale: the factor of its gradients, beside its weight.
        logged: metrics that are on their way from its device.
    """

    number: int
    samples: int
    counts: bool = True
    report: ShardReport = field(default_factory=ShardReport)
    loss: Tensor | None = None
    has_gradients: bool = False
    own_scale: float = 1.0
    mark: ShardDigest | None = None
    scale: float = 1.0
    logged: dict[str, HostRead] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, number: int, *, is_audited: bool, counts: bool = True) -> "Shard":
        """A shard that is about to be computed."""
        mark = ShardDigest() if is_audited else None
        return cls(number, len(call.batch.shard(number)), counts, mark=mark, scale=call.scale)

    def read(self) -> ShardReport:
        """What it came to. Only here the loss is read, since that waits for a GPU."""
        return ask_all([self])()[0]

    def backward(self, parameters: Sequence[Tensor]) -> None:
        """Have autograd compute the gradient of the loss, times the weight; or take the gradients that are there.

        Args:
            parameters: the parameters whose gradients are wanted.

        Raises:
            LossError: the loss function says that it went backward, and left no gradient; or does not say so.
            ModelError, NondeterministicOperation: torch refuses; says how to go on.
        """
        assert self.loss is not None
        if self.has_gradients:
            if self.scale != self.own_scale:
                raise LossError(
                    "precision='fp16': the loss function went backward by itself (BackwardDone), from a loss that "
                    "nobody had scaled: return the loss (in Keras, optimizer.scale_loss(loss) scales it), or use "
                    "arithmetic={'precision': 'bf16'}"
                )
            _weigh(parameters, self.report.weight)
            return
        weight = self.report.weight * self.scale
        with explained():
            (self.loss * weight if weight != 1.0 else self.loss).backward()
        self.loss = self.loss.detach()


@torch.no_grad()
def _weigh(parameters: Sequence[Tensor], weight: float) -> None:
    held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not held:
        raise LossError(
            "the loss function returned BackwardDone, and no trained parameter has a gradient: go backward in it, and "
            "leave the gradients where they are"
        )
    if weight != 1.0:
        for parameter, gradient in held:
            parameter.grad = gradient * weight  # the script may use that memory again, or for two parameters


def ask_all(shards: Sequence[Shard]) -> Callable[[], list[ShardReport]]:
    """Ask for the losses of shards; returns a function that waits for them, and tells what shards came to."""
    by_device: dict[torch.device, list[Shard]] = {}
    for shard in shards:
        shard.report.loss = 0.0
        if type(shard.loss) is Tensor:
            by_device.setdefault(shard.loss.device, []).append(shard)
        elif shard.loss is not None:  # a kind of tensor of its own, such as DTensor
            shard.report.loss = float(shard.loss.detach())
    reads: list[tuple[list[Shard], HostRead]] = []
    for theirs in by_device.values():
        losses = [shard.loss.detach() for shard in theirs if shard.loss is not None]
        wide = torch.float32 if all(loss.dtype in _EXACT_AS_FLOAT32 for loss in losses) else torch.float64
        reads.append((theirs, HostRead(torch.stack([loss.to(wide) for loss in losses]))))

    def answer() -> list[ShardReport]:
        for theirs, read in reads:
            for shard, loss in zip(theirs, read.values().tolist(), strict=True):
                shard.report.loss = loss
        for shard in shards:
            shard.report.metrics |= {name: float(value) for name, value in shard.logged.items()}
        return [shard.report for shard in shards]

    return answer


class ForwardPass:
    """Computes the losses of shards, one after the other.

    Args:
        job: the job to train.
        prepared: the model.
        device: the device on which to compute.
        spans: the worker's spans, if they are kept.
    """

    def __init__(self, job: Job, prepared: Prepared, device: torch.device, spans: Spans | None = None) -> None:
        self._job, self._prepared, self._device, self._spans = job, prepared, device, spans
        self._shard: Shard | None = None

    def compute(self, call: Call, shard: Shard, batch: Any) -> None:
        """Call the loss function with a shard's batch, and give the shard its loss and weight.

        Raises:
            LossError: the loss function returned what is no loss.
            ModelError, NondeterministicOperation: torch refuses; says how to go on.
        """
        seed = stream_seed(self._job.seed, Stream.SHARD, call.step, call.number, call.first + shard.number)
        seed_generators(seed)
        self._shard = shard
        begun = perf_counter()
        try:
            with autocast(self._job, self._device), explained():
                returned = call.loss_fn(self._prepared.model, batch)
        finally:  # the pass may end in mid-model, where the next device goes on
            self._shard = None
            if self._spans is not None:
                self._spans.add("forward", begun, perf_counter(), shard.number)
        shard.loss, weight = read_loss(returned, shard.samples)
        if isinstance(returned, BackwardDone):
            shard.has_gradients, shard.own_scale = True, returned.scale
        # With one shard the weight cancels out, and without it the bits are those of the plain loop.
        shard.report.weight = 1.0 if call.batch.shards == 1 and weight else weight

    def log(self, name: str, value: float | HostRead) -> bool:
        """Note a metric of the shard that is being computed; False if none is."""
        if self._shard is None:
            return False
        self._shard.logged.pop(name, None)
        if isinstance(value, HostRead):
            self._shard.logged[name] = value
        else:
            self._shard.report.metrics[name] = value
        return True


class explained:  # noqa: N801  a context manager, named like one
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
        if kind is not None and kind.__name__ == "FailOnRecompileLimitHit":
            raise JobError(
                f"torch.compile has come to the limit of its kernels, and would compute without compiler from here on, "
                f"on this worker, since others have met other shapes and numbers. Pad to fewer shapes, give what "
                f"changes with the steps as tensors, or allow more: torch._dynamo.config.recompile_limit "
                f"(now {torch._dynamo.config.recompile_limit})"
            ) from error
        if isinstance(error, RuntimeError) and "backward through the graph a second time" in text:
            raise LossError(
                "the graph of the loss is gone: did the loss function go backward by itself? Then return "
                "unisono.BackwardDone(loss), and its gradients are taken as they are"
            ) from error
        if isinstance(error, RuntimeError) and "deterministic" in text and "use_deterministic_algorithms" in text:
            operation = text.split(" ", 1)[0]
            raise NondeterministicOperation(
                f"{operation} has no deterministic implementation on this device, so the same job could end in other "
                f"bits: replace the operation, or accept that: unisono.init(arithmetic={{'deterministic': False}}). "
                f"torch says: {text}"
            ) from error
