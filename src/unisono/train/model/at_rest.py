"""Memory at rest: tensors that must not change from one update to the next, and the check that they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.optim import Optimizer

from unisono.train.model.buffers import Buffers
from unisono.train.model.tensors import version_of
from unisono.word_sums import Summing, combined, flipped_bits, totals
from unisono.words import MODULUS, Sums

MOST_FLIPPED = 2
"""The largest number of bits whose difference is taken for a fault.

A larger difference that torch has not counted is taken for a write of the script, for instance to ``tensor.data``.
Such a write may change the sum of a whole tensor by few bits: halving all its weights does. It changes the sum of each
third of a tensor by one bit at least, which makes three: so sums are taken by thirds.
"""


_VERSION = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The state of a worker's memory when its shards have been computed.

    Attributes:
        digest: a digest of weights and buffers; 0 if none was taken.
        has_flipped: whether a bit differs from what the last update left, although nothing was written there.
        amiss: the number to add to the digest to get that of what the last update left (modulo 2**64).
    """

    digest: int = 0
    has_flipped: bool = False
    amiss: int = 0


class AtRest:
    """Checks the memory that shards are computed with.

    Workers that hold the same tensors compare their digests with each other. Where there is only one copy, its state
    after the last update is compared with its state after its last use. The script may change tensors between two
    steps: writes that torch counts are left out, and so is a difference of more than two bits.

    Args:
        buffers: buffers, of which every worker has a copy at the beginning of each shard.
        state: a function that returns the optimizers' tensors.
        is_only: whether there is no other copy of these tensors.
    """

    def __init__(
        self, weights: Sequence[Tensor], buffers: Buffers, state: Callable[[], Sequence[Tensor]], *, is_only: bool
    ) -> None:
        self._weights, self._buffers, self._state, self._is_only = weights, buffers, state, is_only
        self._summing, self._noting = Summing(), Summing()
        self._left: Sums | None = None  # of the thirds of each tensor
        self._pending: Callable[[], Sums] | None = None  # returns these sums; it waits for the device
        self._written: list[int] = []

    def first(self) -> None:
        """Take the sums when a step begins, if no update has left any."""
        if self._left is None and self._pending is None:
            self.note()

    def begin(self) -> None:
        """Take the script's writes into account when a step is about to be computed."""
        if not self._is_only:
            return
        written = self._writes(self._present())
        if (self._left is None and self._pending is None) or len(written) != len(self._written):
            self.note()
        elif written != self._written:
            # A bit that flips from now on in what the script has written is found as any other.
            left, sums = self._sums_of_update(), self._noting.thirds(self._present())
            assert left is not None, "an update has left it"
            self._left, self._written = np.where(self._unwritten(written), left, sums), written

    def look(self) -> Callable[[], MemoryState]:
        """Take the sums once all shards are computed and nothing is committed.

        Returns:
            a function that waits for the device and returns what was seen.
        """
        compared = [*self._weights, *self._buffers.begun()]
        count, state = len(compared), self._state() if self._is_only else ()
        pending = self._summing.start([*compared, *state])

        def finish() -> MemoryState:
            thirds = pending()
            digest = combined(totals(thirds)[:count])
            if (left := self._sums_of_update()) is None or not self._has_flipped(thirds):
                return MemoryState(digest)
            amiss = combined(totals(left)[:count]) - digest
            return MemoryState(digest, has_flipped=True, amiss=amiss % MODULUS)

        return finish

    def note(self) -> None:
        """Take the sums after an update: everything stays as it is until the next one."""
        if not self._is_only:
            return
        tensors = self._present()
        self._written = self._writes(tensors)
        self._left, self._pending = None, self._noting.start(tensors)

    def has_changed(self) -> bool:
        """Whether a bit has flipped since the last update; False where there is another copy to compare with."""
        tensors = self._present()
        written = self._writes(tensors)
        if self._sums_of_update() is None or len(written) != len(self._written):
            return False
        return self._has_flipped(self._summing.thirds(tensors), self._unwritten(written))

    def _present(self) -> list[Tensor]:
        return [*self._weights, *self._buffers.present(), *self._state()]

    def _writes(self, now: Sequence[Tensor]) -> list[int]:
        """The ids of the tensors, then how often torch says that each was written."""
        try:
            versions = [*map(_VERSION, now)]
        except RuntimeError:
            versions = [*map(version_of, now)]  # this error says what is wrong
        return [*map(id, now), *versions]

    def _unwritten(self, written: Sequence[int]) -> npt.NDArray[np.bool_]:
        """A row for each tensor: whether it is the same one as before, and has not been written since."""
        same = np.array([now == before for now, before in zip(written, self._written, strict=True)], np.bool_)
        tensors, writes = same.reshape(2, -1)
        return np.array(tensors & writes)[:, None]

    def _has_flipped(self, thirds: Sums, looked_at: npt.NDArray[np.bool_] | bool = True) -> bool:
        if (left := self._sums_of_update()) is None or left.tobytes() == thirds.tobytes():
            return False
        return 0 < flipped_bits(left, np.where(looked_at, thirds, left)) <= MOST_FLIPPED

    def _sums_of_update(self) -> Sums | None:
        """The sums that the last update left; waits for the device."""
        if self._pending is not None:
            self._left, self._pending = self._pending(), None
        return self._left


def tensors_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The tensors that optimizers keep, in the order in which they were made."""
    tensors: list[Tensor] = []
    for optimizer in optimizers:
        _add_tensors(optimizer.state.values(), tensors)
    return tensors


def _add_tensors(values: Iterable[Any], tensors: list[Tensor]) -> None:
    """Append the tensors of nested values. Called in each step, where a generator would take twice as long."""
    for part in values:
        if isinstance(part, Tensor):
            tensors.append(part)
        elif isinstance(part, dict):
            _add_tensors(part.values(), tensors)
        elif isinstance(part, list | tuple):
            _add_tensors(part, tensors)
