"""Optimizers whose work workers share: they use more than gradients, or update whole matrices."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, optim
from torch.optim import Optimizer

from unisono.arguments import require_types
from unisono.errors import ModelError

Piece = list[Tensor]
"""The tensors that result from a piece of work."""


class SharingOptimizer(Optimizer):
    """An optimizer with statistics, which are added up like gradients, and with pieces of work that have owners.

    Statistics and pieces follow from the optimizer's state and settings alone, so they are the same on all workers.
    """

    given: Mapping[int, Piece] = {}
    """Results that other workers have computed for the next step, by the numbers of pieces; it computes the others."""

    @property
    @abstractmethod
    def statistics(self) -> Mapping[str, Tensor]:
        """Tensors by name in whose ``grad`` the next backward passes leave sums over samples; empty if none is due.

        They are added up over shards along the summation tree, and divided by the weight, as gradients are.
        """

    @abstractmethod
    def notice(self) -> str:
        """A message to the user about this optimizer; empty from the second call on."""

    @abstractmethod
    def pieces(self) -> list[float]:
        """The cost of each piece of work of the next step, in multiplications. Called once there are gradients."""

    @abstractmethod
    def forms(self, piece: int) -> list[Tensor]:
        """Tensors on the meta device with the shapes and dtypes of the results of a piece."""

    @abstractmethod
    def worked_out(self, piece: int) -> Piece:
        """Compute a piece of work. This does not change the optimizer."""


def sharing_in(optimizers: Sequence[Any]) -> list[SharingOptimizer]:
    """The optimizers among these whose work is shared."""
    return [optimizer for optimizer in optimizers if isinstance(optimizer, SharingOptimizer)]


def statistics_of(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The tensors besides parameters whose gradients the next step of these optimizers uses."""
    return {
        f"{name} of optimizer {number}": tensor
        for number, optimizer in enumerate(sharing_in(optimizers))
        for name, tensor in optimizer.statistics.items()
    }


O = TypeVar("O", bound=type[Optimizer])  # noqa: E741  a class of optimizers

Cost = Callable[[tuple[int, ...]], float]
"""Returns the cost of the update of a tensor of this shape, in any unit; owners are assigned by it."""


def products(shape: tuple[int, ...]) -> float:
    """Multiplications in X ← aX + (bA + cA²)X with A = XXᵀ, of an (m, n) matrix X with m ≤ n: 2m²n + m³.

    This is one iteration of Newton and Schulz, of which Muon makes five (K. Jordan, Muon, 2024). Of a tensor, all
    dimensions but the first are taken as one.
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    short, long = sorted((rows, columns))
    return 2.0 * short * short * long + short**3


_costs: dict[type[Optimizer], Cost] = {optim.Muon: products} if hasattr(optim, "Muon") else {}  # since torch 2.9


def whole_matrix(kind: O, cost: Cost = products) -> O:
    """Share the updates of an optimizer class among workers, or devices: each tensor's is computed by one of them.

    Only the author of the class can tell whether this is possible. Its ``step`` has to update each tensor from that
    tensor, its gradient, its entry in ``state``, and its group alone, and must not keep anything elsewhere.

    Args:
        kind: the class. Subclasses have to be given by themselves.
        cost: a function that returns the cost of the update of a tensor of this shape, in any unit.

    Returns:
        the class, so that this function can be used as a decorator.

    Raises:
        ModelError: it is no class of optimizers.
        JobError: the cost is no function.
    """
    if not issubclass(type(kind), type) or not issubclass(kind, Optimizer):
        raise ModelError(f"unisono.whole_matrix({kind!r}): give it a class of optimizers, such as torch.optim.Muon")
    require_types(whole_matrix, {"cost": cost})
    _costs[kind] = cost
    return kind


def cost_of(optimizer: Optimizer) -> Cost | None:
    """The cost function of an optimizer; None if it is not known to update whole matrices."""
    return _costs.get(type(optimizer))
