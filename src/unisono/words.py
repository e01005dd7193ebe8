"""Sums of the 64-bit words of memory, at its speed: a bit that flips makes another one of them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

WORD = 8
"""Bytes."""

MODULUS = 1 << 64

LARGE = 2**16
"""Bytes from which on torch's sums are faster than NumPy's, whose calls cost half as much."""


class Words:
    """The memory of a tensor, to be summed again and again. It stays as long as this does.

    Args:
        values: a tensor on the CPU, without gaps between its elements. Their order is that of memory.

    Attributes:
        values: the tensor.
    """

    __slots__ = ("_large", "_rest", "_small", "values")

    def __init__(self, values: Tensor) -> None:
        self.values = values
        data = values.detach().as_strided((values.numel(),), (1,)).view(torch.uint8)
        whole = data.numel() // WORD * WORD
        words: Any = data[:whole].numpy().view(np.uint64)
        is_large = whole >= LARGE and data.data_ptr() % WORD == 0
        self._small: Any = None if is_large else words
        self._large = torch.from_numpy(words.view(np.int64)) if is_large else None
        self._rest: Any = data[whole:].numpy() if whole < data.numel() else None

    def __len__(self) -> int:
        return self.values.numel()

    def sum(self) -> int:
        """The sum of all words, modulo 2**64; what does not fill a word counts byte by byte."""
        # Words of 64 bits: a sum that widens what it adds takes 13 times as long.
        found = int(np.add.reduce(self._small)) if self._large is None else int(self._large.sum()) % MODULUS
        return found if self._rest is None else (found + int(np.add.reduce(self._rest, dtype=np.uint64))) % MODULUS


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
