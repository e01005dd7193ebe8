"""Sums of the 64-bit words of tensors on any device, at the memory's speed: cheap enough for every step."""

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
    """Sums the words of tensors, usually of the same ones in each call.

    A flipped bit changes the sum of its tensor by a power of two, so it is always seen. Equal sums do not prove that
    all bits are equal. Tensors are read in place; those of a device all at once, with one wait for it.
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
        """Begin to compute :meth:`thirds` of the tensors as they are now. Returns a function that waits for them."""
        marks = [*map(Tensor.data_ptr, tensors), *map(_BYTES, tensors)]
        if marks != self._marks:
            self._plan(tensors)
            self._marks = marks
        sums = self._words.thirds()
        for number in self._others:
            sums[number, 0] = sum_of_words(tensors[number])
        if not self._on_devices:
            return lambda: sums
        started = [(numbers, words.start()) for numbers, words in self._on_devices]

        def wait() -> Sums:
            for numbers, wait_for_device in started:
                sums[numbers] = wait_for_device()
            return sums

        return wait

    def _plan(self, tensors: Sequence[Tensor]) -> None:
        by_key: dict[tuple[int, int], Bytes | None] = {}
        memories = []
        for tensor in tensors:
            key = tensor.data_ptr(), tensor.nbytes
            if key not in by_key:
                is_read = tensor.device.type == "cpu" and is_dense(tensor)
                by_key[key] = self._bytes[key] if key in self._bytes else bytes_of(tensor) if is_read else None
            memories.append(by_key[key])
        self._bytes, self._words = by_key, ManyWords(memories)  # memory of other tensors is released
        self._on_devices, self._others, by_device = [], [], dict[torch.device, list[int]]()
        for number, memory in enumerate(memories):
            if memory is None and is_accelerator(tensors[number].device) and is_dense(tensors[number]):
                by_device.setdefault(tensors[number].device, []).append(number)
            elif memory is None:
                self._others.append(number)
        for numbers in by_device.values():
            self._on_devices.append((numbers, DeviceWords([tensors[number] for number in numbers])))


def sums_of_words(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of each tensor's words, row by row, with one wait for each device."""
    on_devices = [tensor.detach().contiguous() for tensor in tensors if is_accelerator(tensor.device)]
    device_sums = iter(Summing()(on_devices).tolist())
    return [next(device_sums) if is_accelerator(tensor.device) else sum_of_words(tensor) for tensor in tensors]


def totals(thirds: Sums) -> Sums:
    """The sum of each row."""
    sums: Sums = np.add.reduce(thirds, axis=1)
    return sums


def combined(sums: Sequence[int] | Sums) -> int:
    """One number of 64 bits, above 0, from the sums of several tensors. If one sum differs, the number differs."""
    words = np.asarray(sums, np.uint64)
    return int(np.add.reduce(_factors(len(words)) * words)) or 1


@lru_cache(maxsize=16)
def _factors(count: int) -> npt.NDArray[np.uint64]:
    return _FACTOR * (2 * np.arange(count) + 1).astype(np.uint64)


def flipped_bits(before: Sequence[int] | Sums, after: Sequence[int] | Sums) -> int:
    """The least number of flipped bits that explains how sums have changed; 0 if they have not.

    Args:
        before: the sums of parts of memory, in any shape.
        after: the later sums of these parts, in the same shape.
    """
    differences = np.asarray(after, np.uint64) - np.asarray(before, np.uint64)
    return sum(_signed_powers(int(difference)) for difference in differences[differences != 0])


def _signed_powers(difference: int) -> int:
    # The least number of powers of two whose sums and differences give the number (its non-adjacent form): a bit that
    # flips to 1 adds a power of two, and one that flips to 0 takes it away.
    difference = min(difference, MODULUS - difference)
    count = 0
    while difference:
        if difference & 1:
            count += 1
            difference += 1 if difference & 3 == 3 else -1
        difference >>= 1
    return count
