"""Sums of memory, at the memory's speed: they show flipped bits, and values that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from math import isfinite

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unisono.device import HostRead

WORD = 8
"""The bytes of a word."""

MODULUS = 1 << 64

THIRDS = 3
"""The number of parts of a memory that are summed separately."""

SMALL = 2**14
"""The most bytes of a memory that is copied into one buffer with others and summed with them: each call has a cost."""

_PLAIN = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
"""Dtypes that NumPy has as well."""

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]
"""The sums of several memories, modulo 2**64."""


def bytes_of(values: Tensor) -> Bytes:
    """The memory of a tensor on the CPU without gaps between its elements, kept alive by the result."""
    values = values.detach() if values.requires_grad else values
    if values.dtype in _PLAIN and values.is_contiguous():
        memory: Bytes = values.numpy().reshape(-1).view(np.uint8)
    else:
        memory = values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy()
    return memory


class Words:
    """The memory of a tensor, to be summed repeatedly. It is kept alive.

    Args:
        values: a tensor on the CPU, without gaps between its elements. Their order is that of memory.

    Attributes:
        values: the tensor.
        numel: a function that returns the number of its elements.
    """

    __slots__ = ("_rest", "_words", "numel", "values")

    _rest: Bytes | None

    def __init__(self, values: Tensor) -> None:
        self.values, self.numel = values, values.numel
        data = bytes_of(values)
        if rest := data.size % WORD:
            self._words, self._rest = data[:-rest].view(np.uint64), data[-rest:]
        else:
            self._words, self._rest = data.view(np.uint64), None

    def sum(self) -> int:
        """The sum of all words, modulo 2**64; bytes at the end that fill no word are added one by one."""
        # Words of 64 bits: a sum that has to widen its summands takes 13 times as long.
        total = int(np.add.reduce(self._words))
        return total if self._rest is None else (total + int(np.add.reduce(self._rest, dtype=np.uint64))) % MODULUS


class ManyWords:
    """Several memories, to be summed repeatedly, each third of them separately. They are kept alive.

    One flipped bit changes one third. A script that writes to a whole tensor changes all three.

    Args:
        memories: the memories; None for one that is left out, with the sum 0.
    """

    def __init__(self, memories: Sequence[Bytes | None]) -> None:
        present = [(THIRDS * number, data) for number, data in enumerate(memories) if data is not None]
        cut = [(place, data, data.size // WORD * WORD) for place, data in present]
        words = [(place, data[:whole].view(np.uint64)) for place, data, whole in cut if whole]
        large = [
            (place + third, part)
            for place, memory in words
            if memory.nbytes > SMALL
            for third, part in enumerate(np.array_split(memory, THIRDS))
        ]
        self._count = len(memories)
        self._places, self._large = np.array([place for place, _ in large], np.int64), [part for _, part in large]
        self._small = _Gathered([memory for memory in words if memory[1].nbytes <= SMALL], np.uint64)
        self._rests = _Gathered([(place, data[whole:]) for place, data, whole in cut if whole < data.size], np.uint8)

    def thirds(self) -> Sums:
        """The sums of the thirds of each memory, a row of three numbers; their sum is that of :meth:`Words.sum`."""
        sums = np.zeros(THIRDS * self._count, np.uint64)
        if self._large:
            sums[self._places] = [*map(np.add.reduce, self._large)]
        self._small.add_to(sums)
        self._rests.add_to(sums)
        return sums.reshape(-1, THIRDS)


class _Gathered:
    """Small memories, which are copied into one buffer to be summed."""

    def __init__(self, placed: Sequence[tuple[int, npt.NDArray[np.generic]]], kind: type[np.generic]) -> None:
        self._memories = [memory for _, memory in placed]
        self._values = np.empty(sum(memory.size for memory in self._memories), kind)
        places, starts, begin = list[int](), list[int](), 0
        for place, memory in placed:
            # A memory of fewer than three words has fewer parts.
            cuts = sorted({memory.size * third // THIRDS for third in range(THIRDS)})
            places += range(place, place + len(cuts))
            starts += [begin + start for start in cuts]
            begin += memory.size
        self._places, self._starts = np.array(places, np.int64), np.array(starts, np.int64)

    def add_to(self, sums: Sums) -> None:
        """Add the sum of each part to the sum at its place."""
        if self._memories:
            np.concatenate(self._memories, out=self._values)
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
    """Whether a tensor's elements have no gaps between them, in whatever order they are."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


# Sums of an accelerator's memory: many tensors, and one wait for the device.


class DeviceWords:
    """The memory of tensors on one device, to be summed repeatedly. It is kept alive.

    Each large tensor is summed by a kernel of its own. For a small one, a kernel would take longer to launch than to
    run: small tensors are copied together, and each sum is the difference of two cumulative sums, exact modulo 2**64.

    Args:
        tensors: the tensors, without gaps between their elements.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._large: list[Tensor] = []  # three rows each
        self._pieces: list[Tensor] = []
        self._rests: list[Tensor] = []  # bytes that fill no word, added one by one
        self._shifted: list[tuple[int, Tensor]] = []  # tensors that do not begin at a word: they are copied first
        large, small, rests = list[int](), list[int](), list[int]()
        for number, tensor in enumerate(tensors):
            data = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            if data.data_ptr() % WORD or data.storage_offset() % WORD:
                self._shifted.append((number, data))
                continue
            whole, place = data.numel() // WORD * WORD, THIRDS * number
            words = data[:whole].view(torch.int64)
            if whole > SMALL:
                length = words.numel() // THIRDS
                self._large.append(words[: THIRDS * length].view(THIRDS, length))
                large += range(place, place + THIRDS)
                words, place = words[THIRDS * length :], place + THIRDS - 1
            small += _cut(words, place, self._pieces)
            rests += _cut(data[whole:], place, self._rests)
        self._places = np.array([*large, *small, *rests], np.int64)
        ends = np.cumsum([piece.numel() for piece in (*self._pieces, *self._rests)])
        self._ends = torch.from_numpy(ends).to(tensors[0].device) if len(ends) else None

    def start(self) -> Callable[[], Sums]:
        """Begin to sum the thirds of each tensor, as they are now.

        Returns:
            a function that waits for the sums: a row of three numbers for each tensor; their sum is that on the CPU.
        """
        read = HostRead(self._sums()) if len(self._places) else None
        shifted = DeviceWords([data.clone() for _, data in self._shifted]).start() if self._shifted else None

        def wait() -> Sums:
            sums = np.zeros(THIRDS * self._count, np.uint64)
            if read is not None:
                np.add.at(sums, self._places, read.values().numpy().view(np.uint64))
            rows: Sums = sums.reshape(-1, THIRDS)
            if shifted is not None:
                rows[[number for number, _ in self._shifted]] = shifted()
            return rows

        return wait

    def _sums(self) -> Tensor:
        sums = [words.sum(1) for words in self._large]
        if self._ends is not None:
            rests = [torch.cat(self._rests).to(torch.int64)] if self._rests else []
            cumulative = torch.cat([*self._pieces, *rests]).cumsum(0).index_select(0, self._ends - 1)
            sums += [cumulative[:1], cumulative[1:] - cumulative[:-1]]
        return torch.cat(sums)


def _cut(values: Tensor, place: int, pieces: list[Tensor]) -> Sequence[int]:
    """Append the thirds of some values (fewer than three values have fewer parts). Returns the places of their sums."""
    size = values.numel()
    bounds = sorted({size * third // THIRDS for third in range(THIRDS + 1)})
    parts = [values[start:stop] for start, stop in pairwise(bounds)]
    pieces += parts
    return range(place, place + len(parts)) if len(parts) <= THIRDS - place % THIRDS else [place] * len(parts)


# Whether values are finite: their sum shows it at the memory's speed, since NaN and infinities stay in a sum.

SHORT = 2**13
"""The most elements of short values. For them a call costs more than its work: they are summed together in one."""

LONG = 2**18
"""Values of more elements soon leave the cache. Those of fewer are summed one after the other, with the code in it."""

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Finiteness:
    """Sums values while they are in the cache, to find out later whether all of them are finite."""

    def __init__(self) -> None:
        # The sum, or None for short values, which are summed together later; and the values.
        self._looked: dict[int, tuple[Tensor | None, Tensor]] = {}

    def look(self, values: Tensor, place: int = -1) -> None:
        """Sum values, which must not change until :meth:`start_check` has returned and its result is read.

        Args:
            values: the values, of any dtype; only floating-point ones can be other than finite.
            place: a number for these values, which replace earlier ones with this number; -1 for a new one.
        """
        if values.is_floating_point():
            total = None if values.numel() <= SHORT else values.sum(dtype=_WIDE.get(values.dtype))
            self._looked[-1 - len(self._looked) if place < 0 else place] = total, values

    def start_check(self, others: Iterable[Finiteness] = ()) -> Callable[[], bool]:
        """Begin to check whether all values are finite, those of others included.

        A sum of finite values can overflow: if a sum is not finite, all values are checked.

        Returns:
            a function that waits for the result.
        """
        looked = [*self._looked.values()]
        for other in others:
            looked += other._looked.values()
        reads = [*map(HostRead, _together(looked))]

        def wait() -> bool:
            if all(map(isfinite, chain.from_iterable(map(Tensor.tolist, map(HostRead.values, reads))))):
                return True
            return all(bool(values.isfinite().all()) for _, values in looked)

        return wait

    def forget(self) -> None:
        """Forget all values."""
        self._looked.clear()


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether these tensors hold no NaN and no infinity."""
    finiteness = Finiteness()
    for tensor in tensors:
        finiteness.look(tensor.detach())
    return finiteness.start_check()()


def first_not_finite(values: Tensor) -> float | None:
    """The first element that is NaN or infinite, in the order of rows; None if there is none."""
    flat = values.detach().reshape(-1)
    wrong = flat[~flat.isfinite()]
    return float(wrong[0]) if wrong.numel() else None


def _together(looked: Sequence[tuple[Tensor | None, Tensor]]) -> list[Tensor]:
    sums: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    short: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for total, values in looked:
        if total is None:
            short.setdefault((values.device, values.dtype), []).append(values.detach().reshape(-1))
        else:
            sums.setdefault((total.device, total.dtype), []).append(total)
    for (device, dtype), values_of_kind in short.items():
        wide = _WIDE.get(dtype, dtype)
        sums.setdefault((device, wide), []).append(torch.cat(values_of_kind).sum(dtype=wide))
    return [*map(torch.stack, sums.values())]
