"""Optimizers that update whole matrices: the result for an element depends on others of its tensor, and on no more."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from torch import optim
from torch.optim import Optimizer

from unisono.arguments import require_kinds
from unisono.errors import ModelError

O = TypeVar("O", bound=type[Optimizer])  # noqa: E741  a class of optimizers

Cost = Callable[[tuple[int, ...]], float]
"""Given the shape of a tensor, what its update costs, in any unit: owners are assigned by that."""


def products(shape: tuple[int, ...]) -> float:
    """Multiplications in X ← aX + (bA + cA²)X with A = XXᵀ, of an (m, n) matrix X with m ≤ n: 2m²n + m³.

    It is one iteration of Newton and Schulz, as Muon makes five of (K. Jordan, Muon, 2024).

    Args:
        shape: the tensor's shape. Dimensions behind the first count as one.
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    short, long = sorted((rows, columns))
    return 2.0 * short * short * long + short**3


_costs: dict[type[Optimizer], Cost] = {optim.Muon: products} if hasattr(optim, "Muon") else {}  # since torch 2.9


def whole_matrix(kind: O, cost: Cost = products) -> O:
    """Have the updates of an optimizer's class shared out: each tensor's is worked out by one worker, or device.

    Only the class knows whether that may be. Its ``step`` has to update each tensor from that tensor, its gradient,
    what ``state`` keeps of it, and its group; and to keep nothing elsewhere.

    Args:
        kind: the class. Subclasses are to be named by themselves.
        cost: a function that returns what the update of a tensor of this shape costs, in any unit.

    Returns:
        the class, so that this may stand above it as a decorator.

    Raises:
        ModelError: it is no class of optimizers.
        JobError: the cost is no function.
    """
    if not issubclass(type(kind), type) or not issubclass(kind, Optimizer):
        raise ModelError(f"unisono.whole_matrix({kind!r}): give it a class of optimizers, such as torch.optim.Muon")
    require_kinds(whole_matrix, {"cost": cost})
    _costs[kind] = cost
    return kind


def cost_of(optimizer: Optimizer) -> Cost | None:
    """What the updates of an optimizer's tensors cost; None if nobody has said that it updates whole matrices."""
    return _costs.get(type(optimizer))
