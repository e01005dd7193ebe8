"""The loss and weight of a shard, and the total weight of the shards of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from unisono.arguments import explain_call
from unisono.data.generators import seed_generators
from unisono.device import HostRead, is_accelerator
from unisono.errors import JobError, LossError, ModelError, NondeterministicOperation, PolicyError
from unisono.job import Job
from unisono.plan.order import Stream, stream_seed
from unisono.plan.tree import Node, total
from unisono.received import short
from unisono.reduce.transport import Transport
from unisono.spans import Spans
from unisono.train.config.numerics import autocast
from unisono.train.model.prepared import Prepared
from unisono.train.step.gradients import ShardDigest
from unisono.train.step.step import Call
from unisono.train.step.word import ShardReport

# The total weight of a step's shards, exchanged with a check that all workers' policies decided alike before it.

_MOST = 64
"""The largest number of partial sums of one worker: two for each level of the summation tree."""


def total_weight(transport: Transport, weights: Sequence[float], decided: int = 0) -> float:
    """The sum of the weights of all shards, along the summation tree. Collective.

    The message has the same size whatever policies decided. So workers whose policies decided differently find out
    here, before they send messages whose size or way depends on it.

    Args:
        transport: the transport between the workers.
        weights: the weights of this worker's shards, in order.
        decided: a digest, below 2**53, of what this worker's policies decided before the step.

    Raises:
        PolicyError: workers have other digests, or other numbers of shards.
    """
    tree, split = transport.tree, transport.split
    if split.workers == 1:
        return total(weights)
    covers = [tree.cover(split.of(rank).start, split.of(rank).stop) for rank in range(split.workers)]
    first = split.of(transport.rank).start
    partials = [total(weights[node.start - first : node.stop - first]) for node in covers[transport.rank]]
    rows = _exchanged(transport, decided, partials)
    sums = dict[Node, float]()
    for cover, row in zip(covers, rows, strict=True):
        sums.update(zip(cover, row, strict=False))
    return tree.finish(sums, _add)


def require_agreement(transport: Transport, decided: int) -> None:
    """Refuse to go on with workers that decided differently. Collective; they may call :func:`total_weight` meanwhile.

    Raises:
        PolicyError: workers have other digests, or other numbers of shards.
    """
    _exchanged(transport, decided, [])


def _exchanged(transport: Transport, decided: int, partials: Sequence[float]) -> list[list[float]]:
    row = torch.zeros(2 + _MOST, dtype=torch.float64)
    row[: 2 + len(partials)] = torch.tensor([transport.split.shards, decided, *partials], dtype=torch.float64)
    rows = transport.all_gather(row).tolist()
    if [row[:2] for row in rows] != [rows[0][:2]] * len(rows):
        shards_by_rank = ", ".join(f"rank {rank}: {int(row[0])}" for rank, row in enumerate(rows))
        raise PolicyError(f"the workers' policies decided differently; they have numbers of shards ({shards_by_rank})")
    return [row[2:] for row in rows]


def _add(left: float, right: float) -> float:
    return left + right


# What a loss function may return, and how it is read.


@dataclass(frozen=True, slots=True)
class Weighted:
    """A result of a loss function, or a metric of an evaluation, that is not a mean over samples.

    Attributes:
        loss: the shard's mean loss, a tensor with one element; or the mean of a metric, a number.
        weight: the number of samples, or of tokens, over which the mean is taken: 0, or from 1e-30 to 1e30.
    """

    loss: Tensor | float
    weight: Tensor | float


@dataclass(frozen=True, slots=True)
class BackwardDone:
    """A result of a loss function that has made the backward pass by itself.

    Its gradients are taken as they are. They lie in ``parameter.grad``, and are the gradient of the mean over the
    shard's samples (or over what ``weight`` counts), accumulated over any number of backward passes. They are
    multiplied by the weight, added up over all shards, and divided by the sum of the weights.

    Attributes:
        loss: the shard's mean loss: a number, or a tensor with one element.
        weight: the number of samples, or of tokens, over which the mean is taken; by default the shard's number of
            samples.
        scale: the factor of the loss in the backward pass: 1, or the run's with ``precision="fp16"``.
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
"""Advice for a loss function that returns a tuple, list or dict."""


def as_number(value: Any) -> float | None:
    """A number, or a tensor or array that holds a single one, as a float; None for anything else."""
    if isinstance(value, str | bytes | bytearray) or (isinstance(value, Tensor) and value.numel() != 1):
        return None
    try:
        return float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError):  # too large, or a tensor without a value, for instance
        return None


# One shard, forward and backward.

_EXACT_AS_FLOAT32 = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(slots=True)
class Shard:
    """A shard of this worker while the step is computed.

    Attributes:
        number: the number of the shard in the batch.
        samples: the number of its samples; 0 for an empty one.
        report: the result of the shard.
        loss: the mean loss, once it is computed.
        has_gradients: whether the loss function has made the backward pass by itself.
        own_scale: the factor of the loss in that backward pass.
        mark: the digest of its gradients, if it is audited.
        counts: whether its results on this device count: not if another device of the worker computes it as well.
        scale: the factor of its gradients, beside its weight.
        logged: metrics that its device has not sent yet.
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
        """Make a shard that is about to be computed."""
        mark = ShardDigest() if is_audited else None
        return cls(number, len(call.batch.shard(number)), counts, mark=mark, scale=call.scale)

    def read(self) -> ShardReport:
        """The result of the shard. The loss is read only here, because reading waits for a GPU."""
        return ask_all([self])()[0]

    def backward(self, parameters: Sequence[Tensor]) -> None:
        """Compute the gradient of the loss, times the weight; or take the gradients that are there.

        Raises:
            LossError: the loss function returned ``BackwardDone`` and left no gradient; or made the backward pass
                without saying so.
            ModelError, NondeterministicOperation: torch refuses; says how to go on.
        """
        assert self.loss is not None
        if self.has_gradients:
            if self.scale != self.own_scale:
                raise LossError(
                    "precision='fp16': the loss function called backward() itself (BackwardDone), from a loss that "
                    "nobody had scaled: return the loss (in Keras, optimizer.scale_loss(loss) scales it), or use "
                    "arithmetic={'precision': 'bf16'}"
                )
            _weigh(parameters, self.report.weight)
            return
        weight = self.report.weight * self.scale
        try:
            (self.loss * weight if weight != 1.0 else self.loss).backward()
        except Exception as error:
            explain(error)
            raise
        self.loss = self.loss.detach()


@torch.no_grad()
def _weigh(parameters: Sequence[Tensor], weight: float) -> None:
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        raise LossError(
            "the loss function returned BackwardDone, and no trained parameter has a gradient: go backward in it, and "
            "leave the gradients where they are"
        )
    if weight != 1.0:
        for parameter, gradient in gradients:
            # Not in place: the script may use that memory again, or for two parameters.
            parameter.grad = gradient * weight


def ask_all(shards: Sequence[Shard]) -> Callable[[], list[ShardReport]]:
    """Ask for the losses of shards; returns a function that waits for them, and returns the shards' reports."""
    by_device: dict[torch.device, list[Shard]] = {}
    for shard in shards:
        shard.report.loss = 0.0
        if type(shard.loss) is Tensor and is_accelerator(shard.loss.device):
            by_device.setdefault(shard.loss.device, []).append(shard)
        elif shard.loss is not None:  # on the host already, or of a subclass of Tensor such as DTensor
            shard.report.loss = float(shard.loss.detach())
    reads: list[tuple[list[Shard], HostRead]] = []
    for group in by_device.values():
        losses, dtype = [shard.loss.detach() for shard in group if shard.loss is not None], torch.float32
        for loss in losses:
            dtype = dtype if loss.dtype in _EXACT_AS_FLOAT32 else torch.float64
        reads.append((group, HostRead(torch.stack([loss.to(dtype) for loss in losses]))))

    def answer() -> list[ShardReport]:
        for group, read in reads:
            for shard, loss in zip(group, read.values().tolist(), strict=True):
                shard.report.loss = loss
        for shard in shards:
            for name, value in shard.logged.items():
                shard.report.metrics[name] = float(value)
        return [shard.report for shard in shards]

    return answer


class ForwardPass:
    """Computes the losses of shards, one after the other."""

    def __init__(self, job: Job, prepared: Prepared, device: torch.device, spans: Spans | None = None) -> None:
        self._job, self._prepared, self._device, self._spans = job, prepared, device, spans
        self._shard: Shard | None = None

    def compute(self, call: Call, shard: Shard, batch: Any) -> None:
        """Call the loss function with a shard's batch, and set the shard's loss and weight.

        Raises:
            LossError: the loss function has not returned a loss.
            ModelError, NondeterministicOperation: torch refuses; says how to go on.
        """
        runs_body = getattr(call.loss_fn, "runs_body", False)  # which draws the same whenever it runs again
        number = 0 if runs_body else call.number
        seed = stream_seed(self._job.seed, Stream.SHARD, call.step, number, call.first + shard.number)
        seed_generators(seed)
        self._shard = shard
        begun = perf_counter()
        try:
            # Also for float32: it ends an autocast that the script has begun around the step.
            with autocast(self._job, self._device):
                returned = call.loss_fn(self._prepared.model, batch)
        except Exception as error:
            explain_call(error, call.loss_fn, "a step needs a function loss_fn(model, batch) that returns the loss")
            explain(error)
            raise
        finally:  # also on Left: the pass may end in the middle of the model, where the next device goes on
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


def explain(error: Exception) -> None:
    """Turn an error of torch into one that says how to go on; does nothing with errors that it does not know."""
    text = str(error)
    if isinstance(error, ValueError) and "more than 1 value per channel" in text:
        raise ModelError(
            "BatchNorm got a shard of a single sample, probably of the last, smaller batch: use "
            "run.steps(…, drop_last=True), or a batch_size that leaves a larger last batch"
        ) from error
    if type(error).__name__ == "FailOnRecompileLimitHit":
        raise JobError(
            f"torch.compile has come to the limit of its kernels, and would compute without compiler from here on, "
            f"on this worker, since others have met other shapes and numbers. Pad to fewer shapes, give what "
            f"changes with the steps as tensors, or allow more: torch._dynamo.config.recompile_limit "
            f"(now {torch._dynamo.config.recompile_limit})"
        ) from error
    if isinstance(error, RuntimeError) and "backward through the graph a second time" in text:
        raise LossError(
            "the graph of the loss is gone: did the loss function call backward() itself? Then return "
            "unisono.BackwardDone(loss), and its gradients are taken as they are"
        ) from error
    if isinstance(error, RuntimeError) and "deterministic" in text and "use_deterministic_algorithms" in text:
        operation = text.split(" ", 1)[0]
        raise NondeterministicOperation(
            f"{operation} has no deterministic implementation on this device, so the same job could end in other "
            f"bits: replace the operation, or accept that: unisono.init(arithmetic={{'deterministic': False}}). "
            f"torch says: {text}"
        ) from error
