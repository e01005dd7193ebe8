"""Digests that are cheap enough for every step: sums of words, at the speed of memory."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from unisono.checkpoint.codec import flatten
from unisono.words import MODULUS, Words, is_dense, sum_of_words

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no bit of a sum is lost by it

Sums = tuple[int, ...]
"""Of each tensor's words, modulo 2**64."""


class Summing:
    """Sums the words of tensors, the same ones again and again.

    A flipped bit changes the sum of its tensor by a power of two, so it is always seen. It is no proof that all bits
    are equal. On the CPU tensors are read where they lie.
    """

    def __init__(self) -> None:
        self._words: dict[tuple[int, int], Words | None] = {}

    def __call__(self, tensors: Iterable[Tensor]) -> Sums:
        """The sum of each tensor's words."""
        words: dict[tuple[int, int], Words | None] = {}
        found = tuple(self._sum(tensor, words) for tensor in tensors)
        self._words = words  # what is no longer asked for is let go of
        return found

    def _sum(self, tensor: Tensor, words: dict[tuple[int, int], Words | None]) -> int:
        if tensor.device.type != "cpu":
            return sum_of_words(tensor)
        key = tensor.data_ptr(), tensor.nbytes
        if key not in words:
            words[key] = self._words[key] if key in self._words else Words(tensor) if is_dense(tensor) else None
        found = words[key]
        return sum_of_words(tensor) if found is None else found.sum()


def total_of(sums: Sequence[int], numbers: Iterable[int] | None = None) -> int:
    """The same, and 0 for no sums: totals of some tensors, or of parts of one, add up to the total of all."""
    found = zip(itertools.count() if numbers is None else numbers, sums, strict=numbers is not None)
    return sum(_FACTOR * (2 * number + 1) * each for number, each in found) % MODULUS


def combined(sums: Sequence[int], numbers: Iterable[int] | None = None) -> int:
    """One number of 64 bits, above 0, for the sums of several tensors; another one if a single sum is another one.

    Args:
        sums: the sums of the tensors' words.
        numbers: the tensors' numbers, by default in their order.
    """
    return total_of(sums, numbers) or 1


def tree_digest(tree: Any) -> int:
    """A number of 64 bits for a tree of state: its tensors' words, and all numbers and text beside them.

    Raises:
        CheckpointError: it holds something that cannot be kept; names it.
    """
    return flat_digest(*flatten(tree))


def flat_digest(text: Any, tensors: Mapping[str, Tensor]) -> int:
    """The same for a tree that is taken apart; see :func:`unisono.checkpoint.codec.flatten`."""
    said = hashlib.blake2b(json.dumps(text).encode(), digest_size=8).digest()
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
