"""The squared norm of a gradient that arrives tensor by tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 4096
"""Elements whose squares are added by one call: short enough for float32, and what is left out or not as one."""


class SquaredNorms:
    """Adds up squares in an order that nothing but the tensors' sizes decides, so that it always gives the same bits.

    With ``one_in`` above 1 only every so many-th block of a tensor is read, and stands for the others. Which ones
    changes with ``offset``: over the steps all of them come by. Tensors that have fewer blocks, and what the last block
    lacks, are always read.

    Args:
        tensors: how many a gradient has.
        one_in: how many blocks one stands for.

    Attributes:
        offset: of the first block that is read.
    """

    def __init__(self, tensors: int, one_in: int = 1) -> None:
        self.offset = 0
        self._one_in = one_in
        self._parts: list[Tensor | None] = [None] * tensors

    def begin(self) -> None:
        """Another gradient."""
        self._parts = [None] * len(self._parts)

    @torch.no_grad()
    def take(self, number: int, tensor: Tensor | None) -> None:
        """One of its tensors, once each, in any order. What is absent is 0."""
        if tensor is None or not tensor.numel():
            return
        flat = tensor.reshape(-1)
        blocks = flat.numel() // BLOCK
        parts = []
        if rest := flat.numel() % BLOCK:
            parts.append(_squares(flat[-rest:].view(1, -1)))
        if blocks:
            rows = flat[: blocks * BLOCK].view(blocks, BLOCK)
            if blocks < self._one_in:
                parts.append(_squares(rows))
            else:
                chosen = rows[self.offset % self._one_in :: self._one_in]
                parts.append(_squares(chosen) * (blocks / len(chosen)))
        self._parts[number] = sum(parts[1:], parts[0])

    def total(self) -> float:
        """The squared norm. Reading it waits for a GPU."""
        total = 0.0
        for part in _numbers([part for part in self._parts if part is not None]):
            total += part
        return total


def _squares(rows: Tensor) -> Tensor:
    """The sum of the squares, as float64."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.double().square().sum()


def _numbers(parts: Sequence[Tensor]) -> list[float]:
    found: list[float] = torch.stack(list(parts)).tolist() if parts else []
    return found
