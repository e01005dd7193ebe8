"""Sums of the 64-bit words of memory, at its speed: a bit that flips makes another one of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORD = 8
"""Bytes."""

MODULUS = 1 << 64

THIRDS = 3
"""Of a memory: its parts of which each is summed by itself."""

SMALL = 2**14
"""Bytes of memory that is copied to other such memory, so that one call sums all of it: a call costs more."""

_PLAIN = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
"""Dtypes that NumPy has as well."""

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]
"""Of several memories, modulo 2**64."""


def bytes_of(values: Tensor) -> Bytes:
    """The memory of a tensor on the CPU, without gaps between its elements. It stays as long as this does."""
    values = values.detach() if values.requires_grad else values
    if values.dtype in _PLAIN and values.is_contiguous():
        found: Bytes = values.numpy().reshape(-1).view(np.uint8)
    else:
        found = values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy()
    return found


class Words:
    """The memory of a tensor, to be summed again and again. It stays as long as this does.

    Args:
        values: a tensor on the CPU, without gaps between its elements. Their order is that of memory.

    Attributes:
        values: the tensor.
    """

    __slots__ = ("_rest", "_words", "values")

    def __init__(self, values: Tensor) -> None:
        self.values = values
        data = bytes_of(values)
        whole = data.size // WORD * WORD
        self._words = data[:whole].view(np.uint64)
        self._rest = data[whole:] if whole < data.size else None

    def __len__(self) -> int:
        return self.values.numel()

    def sum(self) -> int:
        """The sum of all words, modulo 2**64; what does not fill a word counts byte by byte."""
        # Words of 64 bits: a sum that widens what it adds takes 13 times as long.
        found = int(np.add.reduce(self._words))
        return found if self._rest is None else (found + int(np.add.reduce(self._rest, dtype=np.uint64))) % MODULUS


class ManyWords:
    """Several memories, to be summed again and again, each third of them by itself. They stay as long as this does.

    One flipped bit changes one third. What a script writes to a whole tensor changes all three.

    Args:
        each: the memories; None for one that is left out, with the sum 0.
    """

    def __init__(self, each: Sequence[Bytes | None]) -> None:
        present = [(THIRDS * number, data) for number, data in enumerate(each) if data is not None]
        cut = [(place, data, data.size // WORD * WORD) for place, data in present]
        words = [(place, data[:whole].view(np.uint64)) for place, data, whole in cut if whole]
        large = [
            (place + third, part)
            for place, one in words
            if one.nbytes > SMALL
            for third, part in enumerate(np.array_split(one, THIRDS))
        ]
        self._count = len(each)
        self._places, self._large = [place for place, _ in large], [part for _, part in large]
        self._small = _Gathered([one for one in words if one[1].nbytes <= SMALL], np.uint64)
        self._rests = _Gathered([(place, data[whole:]) for place, data, whole in cut if whole < data.size], np.uint8)

    def thirds(self) -> Sums:
        """The sums of the thirds of each, a row of three numbers; together they are as :meth:`Words.sum` has it."""
        found = np.zeros(THIRDS * self._count, np.uint64)
        found[self._places] = [np.add.reduce(part) for part in self._large]
        self._small.add_to(found)
        self._rests.add_to(found)
        return found.reshape(-1, THIRDS)

    def sums(self) -> Sums:
        """The sum of each."""
        found: Sums = np.add.reduce(self.thirds(), axis=1)
        return found


class _Gathered:
    """Small memories, which are copied to one place to be summed."""

    def __init__(self, each: Sequence[tuple[int, npt.NDArray[np.generic]]], kind: type[np.generic]) -> None:
        self._each = [one for _, one in each]
        self._values = np.empty(sum(one.size for one in self._each), kind)
        self._places, self._starts, begin = list[int](), list[int](), 0
        for place, one in each:
            cuts = sorted({one.size * third // THIRDS for third in range(THIRDS)})  # fewer where there are fewer words
            self._places += range(place, place + len(cuts))
            self._starts += [begin + start for start in cuts]
            begin += one.size

    def add_to(self, sums: Sums) -> None:
        """Add the sum of each to that in its place."""
        if self._each:
            np.concatenate(self._each, out=self._values)
            sums[self._places] += np.add.reduceat(self._values, self._starts, dtype=np.uint64)


def sum_of_words(tensor: Tensor) -> int:
    """The sum of a tensor's words, row by row, modulo 2**64; on any device."""
    rows = tensor.detach().contiguous().reshape(-1)
    if rows.device.type == "cpu":
        return Words(rows).sum()
    values = rows.view(torch.uint8)
    if values.storage_offset() % WORD:
        values = values.clone()
    whole = values.numel() // WORD * WORD
    return (int(values[:whole].view(torch.int64).sum()) + int(values[whole:].sum(dtype=torch.int64))) % MODULUS


def is_dense(tensor: Tensor) -> bool:
    """Whether nothing lies between a tensor's elements, in whatever order they are."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
