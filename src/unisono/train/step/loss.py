"""What a loss function may return, and what is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.errors import LossError, PolicyError
from unisono.plan.tree import Node
from unisono.reduce.transport import Transport

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
class WeightedLoss:
    """A shard's mean loss, and the number of samples or tokens it is the mean of."""

    loss: Tensor
    weight: float

    @classmethod
    def of(cls, returned: Any, samples: int) -> "WeightedLoss":
        """Read ``loss`` or ``(loss, weight)``.

        Args:
            returned: the value that the loss function returned.
            samples: the number of samples: the weight, unless one was returned.

        Raises:
            LossError: the loss is no scalar that depends on a parameter, or the weight is negative or not finite.
        """
        loss, weight = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, samples)
        if not isinstance(loss, Tensor):
            raise LossError(f"the loss function returned {_kind(loss)}: return a scalar tensor, or (loss, weight)")
        if loss.numel() != 1:
            raise LossError(
                f"the loss function returned a tensor of shape {list(loss.shape)}: return one number, the mean over "
                f"the shard's samples, for instance loss.mean()"
            )
        number = float(weight)
        if not loss.requires_grad and number != 0:
            raise LossError("the loss depends on no parameter: was it detached, or computed under no_grad?")
        if not 0 <= number < float("inf"):
            raise LossError(
                f"the loss function returned the weight {number}: it counts samples or tokens, so it is >= 0"
            )
        return cls(loss.reshape(()), number)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
