"""Sums of the 64-bit words of memory, at its speed: a bit that flips makes another one of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORD = 8
"""Bytes."""

MODULUS = 1 << 64

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
    """Several memories, to be summed again and again, each by itself. They stay as long as this does.

    Args:
        each: the memories; None for one that is left out, with the sum 0.
    """

    def __init__(self, each: Sequence[Bytes | None]) -> None:
        present = [(number, data) for number, data in enumerate(each) if data is not None]
        cut = [(number, data, data.size // WORD * WORD) for number, data in present]
        words = [(number, data[:whole].view(np.uint64)) for number, data, whole in cut if whole]
        large = [(number, one) for number, one in words if one.nbytes > SMALL]
        self._count = len(each)
        self._numbers, self._large = [number for number, _ in large], [one for _, one in large]
        self._small = _Gathered([one for one in words if one[1].nbytes <= SMALL], np.uint64)
        self._rests = _Gathered([(number, data[whole:]) for number, data, whole in cut if whole < data.size], np.uint8)

    def sums(self) -> Sums:
        """The sum of each as :meth:`Words.sum` has it."""
        found = np.zeros(self._count, np.uint64)
        found[self._numbers] = [np.add.reduce(one) for one in self._large]
        self._small.add_to(found)
        self._rests.add_to(found)
        return found


class _Gathered:
    """Small memories, which are copied to one place to be summed."""

    def __init__(self, each: Sequence[tuple[int, npt.NDArray[np.generic]]], kind: type[np.generic]) -> None:
        self._numbers, self._each = [number for number, _ in each], [one for _, one in each]
        sizes = [one.size for one in self._each]
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._values = np.empty(sum(sizes), kind)

    def add_to(self, sums: Sums) -> None:
        """Add the sum of each to that with its number."""
        if self._each:
            np.concatenate(self._each, out=self._values)
            sums[self._numbers] += np.add.reduceat(self._values, self._starts, dtype=np.uint64)


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
