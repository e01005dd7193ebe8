"""Sums of the 64-bit words of an accelerator's memory: many tensors, and one wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unisono.device import HostRead
from unisono.words import SMALL, THIRDS, WORD, Sums


class DeviceWords:
    """The memory of tensors on one device, to be summed again and again. It stays as long as this does.

    Large tensors are summed by a kernel each. Of small ones each kernel would take longer to launch than to run: they
    are copied together, and each sum is the difference of two cumulative ones, exact modulo 2**64.

    Args:
        tensors: the tensors, without gaps between their elements.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._large: list[Tensor] = []  # three rows each
        self._pieces: list[Tensor] = []
        self._rests: list[Tensor] = []  # what does not fill a word counts byte by byte
        self._shifted: list[tuple[int, Tensor]] = []  # such as no word can be read of where they lie
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

    def asked(self) -> Callable[[], Sums]:
        """Ask for the sums of the thirds of each tensor, as they are now.

        Returns:
            a function that waits for them: a row of three numbers for each; together they are as on the CPU.
        """
        read = HostRead(self._sums()) if len(self._places) else None
        shifted = DeviceWords([each.clone() for _, each in self._shifted]).asked() if self._shifted else None

        def answer() -> Sums:
            sums = np.zeros(THIRDS * self._count, np.uint64)
            if read is not None:
                np.add.at(sums, self._places, read.values().numpy().view(np.uint64))
            rows: Sums = sums.reshape(-1, THIRDS)
            if shifted is not None:
                rows[[number for number, _ in self._shifted]] = shifted()
            return rows

        return answer

    def _sums(self) -> Tensor:
        sums = [words.sum(1) for words in self._large]
        if self._ends is not None:
            rests = [torch.cat(self._rests).to(torch.int64)] if self._rests else []
            until = torch.cat([*self._pieces, *rests]).cumsum(0).index_select(0, self._ends - 1)
            sums += [until[:1], until[1:] - until[:-1]]
        return torch.cat(sums)


def _cut(values: Tensor, place: int, pieces: list[Tensor]) -> Sequence[int]:
    """Add the thirds of some values, fewer where there are fewer values; returns their places."""
    size = values.numel()
    bounds = sorted({size * third // THIRDS for third in range(THIRDS + 1)})
    parts = [values[start:stop] for start, stop in pairwise(bounds)]
    pieces += parts
    return range(place, place + len(parts)) if len(parts) <= THIRDS - place % THIRDS else [place] * len(parts)
