"""Digests that are cheap enough for every step: sums of words, at the speed of memory."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.checkpoint.codec import flatten

WORD = 8
"""Bytes."""

MODULUS = 1 << 64

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no bit of a sum is lost by it

Sums = tuple[int, ...]
"""Of each tensor's words, modulo 2**64."""


class Summing:
    """Sums the words of tensors, the same ones again and again.

    A flipped bit changes the sum of its tensor by a power of two, so it is always seen. It is no proof that all bits
    are equal. On the CPU tensors are read where they lie.
    """

    def __init__(self) -> None:
        self._views: dict[tuple[int, int], Any] = {}

    def __call__(self, tensors: Iterable[Tensor]) -> Sums:
        """The sum of each tensor's words."""
        views: dict[tuple[int, int], Any] = {}
        found = tuple(self._sum(tensor, views) for tensor in tensors)
        self._views = views  # what is no longer asked for is let go of
        return found

    def _sum(self, tensor: Tensor, views: dict[tuple[int, int], Any]) -> int:
        if tensor.device.type != "cpu" or not tensor.numel():
            return sum_of_words(tensor)
        key = tensor.data_ptr(), tensor.nbytes
        if key not in views:
            views[key] = self._views[key] if key in self._views else _arrays(tensor)
        found = views[key]
        return (
            sum_of_words(tensor) if found is None else sum(int(np.add.reduce(each, dtype=np.uint64)) for each in found)
        )


def sum_of_words(tensor: Tensor) -> int:
    """The sum of a tensor's words, row by row, modulo 2**64."""
    # Words of 64 bits: a sum that widens what it adds takes 13 times as long.
    values = _bytes(tensor)
    if values.storage_offset() % WORD:
        values = values.clone()
    whole = values.numel() // WORD * WORD
    return int(values[:whole].view(torch.int64).sum()) + int(values[whole:].sum(dtype=torch.int64))


def combined(sums: Sequence[int]) -> int:
    """One number of 64 bits, above 0, for the sums of several tensors; another one if a single sum is another one."""
    return sum(_FACTOR * (2 * number + 1) * each for number, each in enumerate(sums)) % MODULUS or 1


def tree_digest(tree: Any) -> int:
    """A number of 64 bits for a tree of state: its tensors' words, and all numbers and text beside them.

    Raises:
        CheckpointError: it holds something that cannot be kept; names it.
    """
    return flat_digest(*flatten(tree))


def flat_digest(text: Any, tensors: Mapping[str, Tensor]) -> int:
    """The same for a tree that is taken apart; see :func:`unisono.checkpoint.codec.flatten`."""
    said = hashlib.blake2b(json.dumps(text).encode(), digest_size=WORD).digest()
    sums = [sum_of_words(tensors[name]) for name in sorted(tensors)]
    return (int.from_bytes(said, "big") + combined(sums)) % MODULUS or 1


def flipped_bits(before: Sequence[int], after: Sequence[int]) -> int:
    """The least number of flipped bits that would explain why sums are other ones; 0 if they are not."""
    return sum(_signed_powers((new - old) % MODULUS) for old, new in zip(before, after, strict=True))


def _signed_powers(difference: int) -> int:
    # Of how few powers of two it is the sum or difference (the non-adjacent form).
    found = 0
    while difference:
        if difference & 1:
            found += 1
            difference += 1 if difference & 3 == 3 else -1
            difference %= MODULUS
        difference >>= 1
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _arrays(tensor: Tensor) -> list[Any] | None:
    """Where a tensor lies, as words and what is left over; nothing if others lie in between."""
    if not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        return None
    # NumPy's calls cost a fifth of torch's, which counts where there are many small tensors.
    values = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    if tensor.data_ptr() % WORD:
        return [values]
    whole = values.size // WORD * WORD
    return [part for part in (values[:whole].view(np.uint64), values[whole:]) if part.size]
