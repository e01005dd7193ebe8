"""Sums of the 64-bit words of tensors wherever they lie: cheap enough for every step, at the speed of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unisono.device import is_accelerator
from unisono.words import MODULUS, Bytes, DeviceWords, ManyWords, Sums, bytes_of, is_dense, sum_of_words

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a sum is lost by it

_BYTES = attrgetter("nbytes")


class Summing:
    """Sums the words of tensors, the same ones again and again.

    A flipped bit changes the sum of its tensor by a power of two, so it is always seen. It is no proof that all bits
    are equal. Tensors are read where they lie; those of a device all at once, with one wait for it.
    """

    def __init__(self) -> None:
        self._marks: list[int] | None = None
        self._bytes: dict[tuple[int, int], Bytes | None] = {}
        self._words = ManyWords(())
        self._on_devices: list[tuple[list[int], DeviceWords]] = []
        self._others: list[int] = []

    def __call__(self, tensors: Sequence[Tensor]) -> Sums:
        """The sum of each tensor's words."""
        return totals(self.thirds(tensors))

    def thirds(self, tensors: Sequence[Tensor]) -> Sums:
        """The sums of the words of each tensor's thirds, a row of three for each."""
        return self.start(tensors)()

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], Sums]:
        """Ask for these sums, of the tensors as they are now; returns a function that waits for them."""
        marks = [*map(Tensor.data_ptr, tensors), *map(_BYTES, tensors)]
        if marks != self._marks:
            self._plan(tensors)
            self._marks = marks
        sums = self._words.thirds()
        for number in self._others:
            sums[number, 0] = sum_of_words(tensors[number])
        if not self._on_devices:
            return lambda: sums
        asked = [(numbers, words.start()) for numbers, words in self._on_devices]

        def answer() -> Sums:
            for numbers, sums_of_device in asked:
                sums[numbers] = sums_of_device()
            return sums

        return answer

    def _plan(self, tensors: Sequence[Tensor]) -> None:
        known: dict[tuple[int, int], Bytes | None] = {}
        memories = []
        for tensor in tensors:
            key = tensor.data_ptr(), tensor.nbytes
            if key not in known:
                is_read = tensor.device.type == "cpu" and is_dense(tensor)
                known[key] = self._bytes[key] if key in self._bytes else bytes_of(tensor) if is_read else None
            memories.append(known[key])
        self._bytes, self._words = known, ManyWords(memories)  # what is no longer asked for is let go of
        self._on_devices, self._others, by_device = [], [], dict[torch.device, list[int]]()
        for number, memory in enumerate(memories):
            if memory is None and is_accelerator(tensors[number].device) and is_dense(tensors[number]):
                by_device.setdefault(tensors[number].device, []).append(number)
            elif memory is None:
                self._others.append(number)
        for numbers in by_device.values():
            self._on_devices.append((numbers, DeviceWords([tensors[number] for number in numbers])))


def sums_of_words(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of each tensor's words, row by row; of those on a device with one wait for it."""
    on_devices = [tensor.detach().contiguous() for tensor in tensors if is_accelerator(tensor.device)]
    their_sums = iter(Summing()(on_devices).tolist())
    return [next(their_sums) if is_accelerator(tensor.device) else sum_of_words(tensor) for tensor in tensors]


def totals(thirds: Sums) -> Sums:
    """The sum of each row."""
    found: Sums = np.add.reduce(thirds, axis=1)
    return found


def combined(sums: Sequence[int] | Sums) -> int:
    """One number of 64 bits, above 0, for the sums of several tensors; another one if a single sum is another one."""
    words = np.asarray(sums, np.uint64)
    return int(np.add.reduce(_factors(len(words)) * words)) or 1


@lru_cache(maxsize=16)
def _factors(count: int) -> npt.NDArray[np.uint64]:
    return _FACTOR * (2 * np.arange(count) + 1).astype(np.uint64)


def flipped_bits(before: Sequence[int] | Sums, after: Sequence[int] | Sums) -> int:
    """The least number of flipped bits that would explain why sums are other ones; 0 if they are not.

    Args:
        before: sums of parts of memory, in any shape.
        after: the same, later.
    """
    differences = np.asarray(after, np.uint64) - np.asarray(before, np.uint64)
    return sum(_signed_powers(int(difference)) for difference in differences[differences != 0])


def _signed_powers(difference: int) -> int:
    # Of how few powers of two it is the sum or difference (the non-adjacent form). Cleared bits take one away.
    difference = min(difference, MODULUS - difference)
    count = 0
    while difference:
        if difference & 1:
            count += 1
            difference += 1 if difference & 3 == 3 else -1
        difference >>= 1
    return count


# Of an accelerator's memory: many tensors, and one wait for the device.
