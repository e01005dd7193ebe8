"""Optimizers that go by more than gradients, and whose dearest work is done once, for all workers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Piece = list[Tensor]
"""What comes of a piece of work."""


class SharingOptimizer(Optimizer):
    """An optimizer with statistics, which are added up like gradients, and with pieces of work that have owners.

    All of it follows from the optimizer's state and settings, so all workers come to the same.
    """

    given: Mapping[int, Piece] = {}
    """What others have worked out for the next step, by the numbers of pieces; it works the rest out by itself."""

    @property
    @abstractmethod
    def statistics(self) -> Mapping[str, Tensor]:
        """Tensors by name in whose ``grad`` the next backward passes leave sums over samples; none if none is due.

        Shard for shard they are added up along the summation tree, and divided by the weight, as gradients are.
        """

    @abstractmethod
    def notice(self) -> str:
        """What a person should know of this optimizer; empty from the second time on."""

    @abstractmethod
    def pieces(self) -> list[float]:
        """What each piece of work of the next step costs, in multiplications, now that there are gradients."""

    @abstractmethod
    def forms(self, piece: int) -> list[Tensor]:
        """Tensors on the meta device with the shapes and dtypes of what comes of a piece."""

    @abstractmethod
    def worked_out(self, piece: int) -> Piece:
        """Do a piece of work. Changes nothing."""


def sharing_in(optimizers: Sequence[Any]) -> list[SharingOptimizer]:
    """Those of these optimizers that are such."""
    return [one for one in optimizers if isinstance(one, SharingOptimizer)]


def statistics_of(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """What the next step of these optimizers goes by besides gradients."""
    return {
        f"{name} of optimizer {number}": each
        for number, one in enumerate(sharing_in(optimizers))
        for name, each in one.statistics.items()
    }
