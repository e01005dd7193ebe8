"""The squared norm of a gradient that arrives tensor by tensor."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

SMALL = 2**16
"""Elements up to which a tensor is kept until the gradient is whole, for one call to read all of these."""

BLOCK = 4096
"""Elements whose squares are added by one call: short enough for float32, and what is left out or not as one."""

LARGE = 2**22
"""Elements above which the mean gradient is distributed, if all of it is read: less is read sooner than asked for."""

PIECE = 2**20
"""Elements of the mean gradient that one worker reads for all of them. No number of workers decides where one ends."""


class SquaredNorms:
    """Adds up squares in an order that nothing but the tensors' sizes decides, so that it always gives the same bits.

    With ``one_in`` above 1 only every so many-th block of a tensor is read, and stands for the others. Which ones
    changes with ``offset``: over the steps all of them come by. Small tensors, tensors that have fewer blocks, and what
    the last block lacks, are always read.

    Args:
        one_in: the number of blocks that one block stands for.

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
        """Begin with another gradient."""
        self._parts = [()] * len(self._parts)
        self._small = {}

    def take(self, number: int, tensor: Tensor | None) -> None:
        """Take a tensor of the gradient, in any order; it stays unchanged until :meth:`total`. Absent ones are 0."""
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
        """The squared norm. Reading it waits for a GPU."""
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
    """The squared norms of the pieces of a gradient that are one worker's to read.

    The places of the others are 0, so the sum over all workers has every piece's, with the same bits for any number.
    The result is 1-D, of float64, with a place per piece.
    """
    pieces = [piece for tensor in tensors if tensor is not None for piece in _pieces(tensor.detach().reshape(-1))]
    squares = torch.zeros(len(pieces), dtype=torch.float64)
    if mine := pieces[rank::workers]:
        norms = [torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=1)) for rows in mine]
        squares[rank::workers] = torch.stack(norms).double().square()
    return squares


def _pieces(flat: Tensor) -> list[Tensor]:
    """Blocks as rows of matrices, and what the last block lacks in one of a single row."""
    whole = flat.numel() // BLOCK * BLOCK
    pieces = [*flat[:whole].view(-1, BLOCK).split(PIECE // BLOCK), flat[whole:].view(1, -1)]
    return [piece for piece in pieces if piece.numel()]


class _Part(NamedTuple):
    """Norms of some blocks of a tensor, and how many blocks each of them stands for."""

    norms: Tensor
    scale: float
