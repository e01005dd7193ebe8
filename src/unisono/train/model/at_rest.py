"""Memory at rest: tensors that must not change from one update to the next, and the check that they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.quick_digest import Summing, combined, flipped_bits, totals
from unisono.train.model.buffers import Buffers
from unisono.train.model.tensors import version_of
from unisono.words import MODULUS, Sums

MOST_FLIPPED = 2
"""Bits: a larger difference that torch has not counted is taken for a write of the script, say to ``tensor.data``.

Halving all weights of a tensor changes its sum by few powers of two, but the sum of each third by one at least.
"""


_VERSION = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a worker's memory when its shards are computed.

    Attributes:
        digest: a digest of weights and buffers; 0 if nobody looks.
        has_flipped: whether a bit of it is another one than the update before has left, and nobody has written it.
        amiss: what the digest then lacks to be that of what that update has left (modulo 2**64).
    """

    digest: int = 0
    has_flipped: bool = False
    amiss: int = 0


class AtRest:
    """Compares what a worker's shards were computed with.

    Workers that hold the same compare digests with each other. Where there is one copy, it is compared with itself: as
    the update left it, and as it is after its last use. The script may change it between two steps: what torch counts
    as written is left out, and so is a difference that more than two flipped bits would be needed for.

    Args:
        weights: the weights.
        buffers: buffers, of which every worker has a copy at the beginning of each shard.
        state: a function that returns the optimizers' tensors.
        is_only: whether there is no other copy of any of it.
    """

    def __init__(
        self, weights: Sequence[Tensor], buffers: Buffers, state: Callable[[], Sequence[Tensor]], *, is_only: bool
    ) -> None:
        self._weights, self._buffers, self._state, self._is_only = weights, buffers, state, is_only
        self._summing, self._noting = Summing(), Summing()
        self._left: Sums | None = None  # of each tensor the sums of its thirds
        self._asked: Callable[[], Sums] | None = None  # for them, and nobody has waited yet
        self._written: list[int] = []

    def first(self) -> None:
        """A step begins, perhaps the first: what is there now stays until the step is computed."""
        if self._left is None and self._asked is None:
            self.note()

    def begin(self) -> None:
        """A step is about to be computed."""
        if not self._is_only:
            return
        written = self._writes(self._present())
        if (self._left is None and self._asked is None) or len(written) != len(self._written):
            self.note()
        elif written != self._written:
            # What the script has written stays as it is now: a bit of it that flips from here on is found as any other.
            left, sums = self._known(), self._noting.thirds(self._present())
            assert left is not None, "an update has left it"
            self._left, self._written = np.where(self._unwritten(written), left, sums), written

    def look(self) -> Callable[[], Seen]:
        """All shards are computed, and nothing is committed: ask what is there now.

        Returns:
            a function that waits for the answer.
        """
        compared = [*self._weights, *self._buffers.begun()]
        count, state = len(compared), self._state() if self._is_only else ()
        asked = self._summing.asked([*compared, *state])

        def seen() -> Seen:
            thirds = asked()
            digest = combined(totals(thirds)[:count])
            if (left := self._known()) is None or not self._has_flipped(thirds):
                return Seen(digest)
            amiss = combined(totals(left)[:count]) - digest
            return Seen(digest, has_flipped=True, amiss=amiss % MODULUS)

        return seen

    def note(self) -> None:
        """An update is done: everything stays as it is until the next one."""
        if not self._is_only:
            return
        now = self._present()
        self._written = self._writes(now)
        self._left, self._asked = None, self._noting.asked(now)

    def has_changed(self) -> bool:
        """Whether a bit has flipped since the last update, where there is no other copy to compare with."""
        now = self._present()
        written = self._writes(now)
        if self._known() is None or len(written) != len(self._written):
            return False
        return self._has_flipped(self._summing.thirds(now), self._unwritten(written))

    def _present(self) -> list[Tensor]:
        return [*self._weights, *self._buffers.present(), *self._state()]

    def _writes(self, now: Sequence[Tensor]) -> list[int]:
        """Which tensors these are, and how often torch says that each was written."""
        try:
            versions = [*map(_VERSION, now)]
        except RuntimeError:
            versions = [*map(version_of, now)]  # which says what is wrong
        return [*map(id, now), *versions]

    def _unwritten(self, written: Sequence[int]) -> npt.NDArray[np.bool_]:
        """A row for each tensor: whether it is the one that was looked at, and nobody has written it since."""
        same = np.array([now == before for now, before in zip(written, self._written, strict=True)], np.bool_)
        tensors, writes = same.reshape(2, -1)
        return np.array(tensors & writes)[:, None]

    def _has_flipped(self, thirds: Sums, looked_at: npt.NDArray[np.bool_] | bool = True) -> bool:
        if (left := self._known()) is None:
            return False
        return 0 < flipped_bits(left, np.where(looked_at, thirds, left)) <= MOST_FLIPPED

    def _known(self) -> Sums | None:
        """What the last update has left, now that somebody wants to know it."""
        if self._asked is not None:
            self._left, self._asked = self._asked(), None
        return self._left


def kept_by(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The tensors that optimizers keep, in the order in which they were made."""
    found: list[Tensor] = []
    for one in optimizers:
        for state in one.state.values():
            _add_tensors(state, found)
    return found


def _add_tensors(value: Any, found: list[Tensor]) -> None:  # in each step: a generator would take twice as long
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, dict | list | tuple):
            _add_tensors(part, found)
