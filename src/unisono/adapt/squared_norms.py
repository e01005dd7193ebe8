"""The squared norm of a gradient that arrives tensor by tensor."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

SMALL = 2**16
"""The most elements of a tensor that is kept until the gradient is complete, when one call reads all such tensors."""

BLOCK = 4096
"""The elements of a block, which is read whole or not at all: few enough for a sum of their squares in float32."""

LARGE = 2**22
"""The elements above which workers share the reading of the mean gradient, if all of it is read: sharing takes time."""

PIECE = 2**20
"""The elements of a piece of the mean gradient, which one worker reads for all; it does not depend on their number."""


class SquaredNorms:
    """Adds up squares in an order that depends on the tensors' sizes alone, so the result always has the same bits.

    With ``one_in`` above 1 only one in so many blocks of a tensor is read, and stands for the others. ``offset`` says
    with which block that begins: when it changes with the steps, all blocks are read in turn. Small tensors, tensors
    with fewer blocks, and the elements after the last block, are always read.

    Args:
        tensors: the number of tensors.
        one_in: the number of blocks for which one block stands.

    Attributes:
        offset: the number of the first block that is read.
    """

    def __init__(self, tensors: int, one_in: int = 1) -> None:
        self.offset = 0
        self.one_in = one_in
        self._parts: list[Sequence[_Part]] = [()] * tensors
        self._small: dict[int, Tensor] = {}
        self._scales: dict[tuple[tuple[int, float], ...], Tensor] = {}

    def begin(self) -> None:
        """Forget the gradient, and begin with the next one."""
        self._parts = [()] * len(self._parts)
        self._small = {}

    def take(self, number: int, tensor: Tensor | None) -> None:
        """Take a tensor of the gradient, in any order. It must not change before :meth:`total`; None counts as 0."""
        if tensor is None or not tensor.numel():
            return
        if tensor.numel() <= SMALL:
            self._small[number] = tensor
            return
        tensor = tensor.detach()
        flat = tensor.reshape(-1)
        blocks, rest = divmod(flat.numel(), BLOCK)
        parts = []
        if rest:
            parts.append(_Part(torch.linalg.vector_norm(flat[-rest:] if blocks else flat).view(1), 1.0))
        if blocks:
            rows = flat[: blocks * BLOCK].view(blocks, BLOCK)
            if blocks >= self.one_in:
                rows = rows[self.offset % self.one_in :: self.one_in]
            parts.append(_Part(torch.linalg.vector_norm(rows, dim=1), blocks / len(rows)))
        self._parts[number] = parts

    def total(self) -> float:
        """The squared norm. The call waits for a GPU."""
        parts = [part for parts in self._parts for part in parts]
        total = 0.0
        if self._small:
            small = [self._small[number].detach() for number in sorted(self._small)]
            total = float(get_total_norm(small)) ** 2
        if not parts:
            return total
        norms = torch.cat([part.norms for part in parts]).double()
        return total + float(torch.dot(norms.square(), self._scales_of(parts).to(norms.device)))

    def _scales_of(self, parts: Sequence["_Part"]) -> Tensor:
        """The number of blocks that each of the norms stands for."""
        key = tuple((part.norms.numel(), part.scale) for part in parts)
        if key not in self._scales:
            scales = [torch.full((count,), scale, dtype=torch.float64) for count, scale in key]
            self._scales[key] = torch.cat(scales)
        return self._scales[key]


def squares_of(tensors: Sequence[Tensor | None], rank: int, workers: int) -> Tensor:
    """The squared norms of the pieces of a gradient that one worker reads.

    The elements of other workers' pieces are 0, so the sum over all workers has the squares of every piece, with the
    same bits for any number of workers. The result is 1-D, of float64, with an element for each piece.
    """
    pieces = [piece for tensor in tensors if tensor is not None for piece in _pieces(tensor.detach().reshape(-1))]
    squares = torch.zeros(len(pieces), dtype=torch.float64)
    if own := pieces[rank::workers]:
        norms = [torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=1)) for rows in own]
        squares[rank::workers] = torch.stack(norms).double().square()
    return squares


def _pieces(flat: Tensor) -> list[Tensor]:
    """Matrices whose rows are blocks, and a matrix of one row with the elements after the last block."""
    whole = flat.numel() // BLOCK * BLOCK
    pieces = [*flat[:whole].view(-1, BLOCK).split(PIECE // BLOCK), flat[whole:].view(1, -1)]
    return [piece for piece in pieces if piece.numel()]


class _Part(NamedTuple):
    """Norms of some blocks of a tensor, and the number of blocks for which each of them stands."""

    norms: Tensor
    scale: float
