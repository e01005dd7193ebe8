"""One step: the object that the body of a loop gets."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.errors import JobError
from unisono.plan.batches import Batch, Position
from unisono.received import short
from unisono.train.model.update import ScriptUpdate

LossFunction = Callable[[Any, Any], Any]
"""``loss_fn(model, batch) -> loss``, ``-> Weighted(loss, weight)`` or ``-> BackwardDone(loss)``."""


def global_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients of parameters together, as torch's ``clip_grad_norm_`` computes it."""
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def norm_one_by_one(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together. They are used one after the other: an iterator may make them as it goes."""
    norms = [norm for gradient in gradients for norm in torch._foreach_norm([gradient], 2.0)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


@dataclass(frozen=True, slots=True)
class Clip:
    """The limits on the step's gradient before the update: on its global norm, on each value, or none.

    Raises:
        JobError: a limit is no number, or below 0.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("clip_norm", self.norm), ("clip_value", self.value)):
            if limit is not None and not (isinstance(limit, Real) and limit >= 0):
                raise JobError(f"{name}={short(limit)}: needs a number from 0 on, or None")

    @property
    def limits(self) -> bool:
        """Whether there is a limit."""
        return self.norm is not None or self.value is not None

    def apply(
        self, parameters: Sequence[Tensor], norm_of: Callable[[Sequence[Tensor]], Tensor] = global_norm
    ) -> Tensor | None:
        """Limit the parameters' gradients in place.

        Return the global norm before it was limited; None if there is no limit on it.
        """
        norm = None
        if self.norm is not None:
            norm = norm_of(parameters)
            torch.nn.utils.clip_grads_with_norm_(parameters, self.norm, norm)
        if self.value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self.value)
        return norm


@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``step.run``, with everything that decides its result, so that it can be computed again.

    Attributes:
        step: the step's number in the job.
        number: the number of the call within the step, 0 for the first.
        batch: the global batch.
        shards: the batches of this worker's shards; None for an empty one.
        update: the update that the script makes by itself; None for the optimizers' steps.
        first: the number of the batch's first shard, if the batch is a worker's own part of another one.
        load: a function that returns the batch of any shard, to audit it.
        is_last: whether the loop ends with this step, so that every worker is audited.
        decided: a digest of what policies and samplers decided before the step.
        scale: the factor of its losses, a power of two.
        computed: a function that is called when this worker's shards are computed, with the seconds that this took.
    """

    step: int
    number: int
    batch: Batch
    shards: Sequence[Any]
    loss_fn: LossFunction
    optimizers: tuple[Optimizer, ...]
    clip: Clip
    update: ScriptUpdate | None = None
    first: int = 0
    load: Callable[[int], Any] | None = None
    is_last: bool = False
    decided: int = 0
    scale: float = 1.0
    computed: Callable[[float], None] = lambda seconds: None


class Step:
    """One global batch, and the method that trains on it.

    Attributes:
        number: the number of the step in the whole job, from 0.
        epoch: the number of the pass over the data set, from 0.
        position: the number of samples consumed in the whole job before this step.
        size: the number of samples in this global batch.
        is_last_in_epoch: whether the epoch ends with this step.
        is_last: whether the loop ends with this step, as far as this is known before it is computed.
        batch: the samples of the global batch, and the shards that it is cut into.
        metrics: the means, over the global batch, of what the loss functions logged.
        curvature: the figures that ``run.curvature`` has measured on its batch, by name.
        loss: the mean loss of the newest call of ``run``, which is set before an update of the script's own is called.
        is_skipped: whether the newest call of ``run`` updated nothing: its loss or gradient was not finite.
        returned: the value that the update of the newest call returned; None without one, or if it was left out.
        generation: the number of the generation of workers in which its shards were loaded.
        mark: a number that identifies its samples, if these do not follow from the job; 0 if they do.
        computed_s: the seconds that this worker took for its shards, in the newest call of ``run``.
    """

    def __init__(
        self,
        position: Position,
        batch: Batch,
        load: Callable[[], Sequence[Any]],
        compute: "Compute",
        *,
        is_last: bool = False,
    ) -> None:
        self.number = position.step
        self.epoch = batch.epoch
        self.position = position.samples
        self.size = batch.size
        self.is_last_in_epoch = batch.is_last_in_epoch
        self.is_last = is_last
        self.metrics: dict[str, float] = {}
        self.curvature: dict[str, float] = {}
        self.loss = math.nan
        self.is_skipped = False
        self.returned: Any = None
        self.calls = 0
        self.computed_s = 0.0
        self.batch = batch
        self.generation, self.mark = -1, 0
        self._load = load
        self._compute = compute
        self._shards = self._load()

    @property
    def shards(self) -> Sequence[Any]:
        """The batches of this worker's shards; None for an empty one. They change when it is given other shards."""
        return self._load()

    def shards_in(self, generation: int) -> Sequence[Any]:
        """The shards in a generation. They are loaded only once in each: only a new one gives a worker other shards."""
        if generation != self.generation:
            self._shards, self.generation = self._load(), generation
        return self._shards

    def run(
        self,
        loss_fn: LossFunction,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        update: Callable[[], Any] | None = None,
    ) -> float:
        """Compute the loss and its gradient over the global batch, and update the weights.

        Every worker calls it, and it returns the same on every worker. It is atomic: it commits on all workers or on
        none. It may be called several times in a step, for several optimizers on one batch. With a strategy that is not
        exact, each worker updates its own weights, with its own part of the batch.

        Args:
            loss_fn: ``loss_fn(model, batch)``, called once for each shard of this worker; returns the mean loss of that
                shard; ``unisono.Weighted(loss, weight)`` if the mean is not over samples but, for instance, over
                tokens; or ``unisono.BackwardDone(loss)`` if it has made the backward pass by itself.
            optimizer: one or several of those given to ``prepare``; all of them by default.
            clip_norm: the largest global norm of the gradient.
            clip_value: the largest absolute value in the gradient.
            update: a function without arguments that makes the update, in place of the optimizers' steps. It is called
                once on each worker, when all is worked out, with the mean gradient in ``parameter.grad`` of the trained
                parameters (None where no shard used one). It is called only once even if the step is repeated because a
                worker was lost. It may change gradients, and must not make a collective call. If it raises an error,
                nothing of the step counts, and the run makes no further collective call. Its result is in
                :attr:`returned`.

        Returns:
            the mean loss over the global batch, weighted by the shards' samples or weights; NaN if the step was
                skipped, unless only its gradient has overflowed, in float16. With a strategy that is not exact, the
                mean over what this worker computed; or, if others took all of the step, the newest mean that it knows
                of, and NaN if there is none yet.

        Raises:
            LossError: the loss is no scalar, NaN or infinite; names step, shard and rank.
            ModelError: a gradient is sparse, or the model changed after ``prepare``.
            JobError: ``update`` is no function, makes a collective call, or is not possible with the strategy.
            NondeterministicOperation: an operation has no deterministic implementation; names it.
            WorkerLost: another worker is lost.
        """
        own = None if update is None else ScriptUpdate(update, self._set_loss)
        self.returned = None
        self.loss = self._compute(self, loss_fn, optimizer, Clip(clip_norm, clip_value), own)
        self.returned = None if own is None else own.returned
        self.calls += 1
        return self.loss

    def _set_loss(self, loss: float) -> None:
        self.loss = loss


Compute = Callable[[Step, LossFunction, Optimizer | Sequence[Optimizer] | None, Clip, ScriptUpdate | None], float]
"""The function that a step's ``run`` calls."""
