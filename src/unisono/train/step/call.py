"""One call of ``step.run``, and what the script says in it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.errors import JobError
from unisono.plan.batches import Batch
from unisono.received import short
from unisono.train.model.own_update import OwnUpdate

LossFunction = Callable[[Any, Any], Any]
"""``loss_fn(model, batch) -> loss``, ``-> Weighted(loss, weight)`` or ``-> BackwardDone(loss)``."""


def global_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients of parameters together, as ``clip_grad_norm_`` of torch computes it."""
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])


def norm_one_by_one(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of gradients of which each is put together when its turn comes."""
    norms = [norm for each in gradients for norm in torch._foreach_norm([each], 2.0)]
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
        """Whether there is a limit at all."""
        return self.norm is not None or self.value is not None

    def apply(
        self, parameters: Sequence[Tensor], norm_of: Callable[[Sequence[Tensor]], Tensor] = global_norm
    ) -> Tensor | None:
        """Limit the parameters' gradients in place; returns their global norm if it is limited.

        Args:
            parameters: the parameters.
            norm_of: a function that returns the norm of all their gradients together.
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
    """One call of ``step.run``: everything that decides its result, so that it can be computed again.

    Attributes:
        step: the step's number in the job.
        number: the number of the call within the step, 0 for the first.
        batch: the global batch.
        shards: the batches of this worker's shards; None for an empty one.
        loss_fn: the loss function of the script.
        optimizers: the optimizers that make the update.
        clip: the limits on the gradient.
        update: the update that the script makes by itself; None for the optimizers' steps.
        first: the number of the batch's first shard, where the batch is a worker's own part of another one.
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
    update: OwnUpdate | None = None
    first: int = 0
    load: Callable[[int], Any] | None = None
    is_last: bool = False
    decided: int = 0
    scale: float = 1.0
    computed: Callable[[float], None] = lambda seconds: None
