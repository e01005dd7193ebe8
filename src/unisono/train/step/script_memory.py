"""The memory in which scripts see parameters and optimizer state, whoever shares them."""

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from threading import RLock
from weakref import WeakSet

import torch
from torch import Tensor

from unisono.reduce.buckets import Bucket
from unisono.reduce.segment import PrivateView, Segment, flats_in, pages, sees_writes, starts_of

Kind = tuple[str, torch.dtype]
"""What optimizers keep for each element, by name; in each dtype by itself."""

Places = Mapping[Kind | None, Sequence[Tensor]]
"""For the weights (None) and each kind, a tensor per parameter."""

Rows = list[tuple[Tensor, ...]]
"""Flat buffers: the weights' buckets, then those of each kind."""


LOOKS_EVERY = 64
"""Calls, whatever happens in bodies: as often as weights are compared around shards."""


def _page_faults() -> int:
    """Of this process so far, those that read nothing from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class ShownState:
    """Parameters and optimizer state, as the script sees them: memory that stays where it is.

    Args:
        buckets: the layout of the parameters.
        kinds: what optimizers keep of any parameter, in this order.

    Attributes:
        layouts: the buckets of the weights, and of each kind.
        view: the memory.
        rows: flat buffers of it.
        tensors: a tensor per parameter, in its shape, for the weights (None) and each kind; each has a storage of its
            own.
    """

    def __init__(self, buckets: Sequence[Bucket], kinds: Sequence[Kind]) -> None:
        self._key = tuple(buckets), tuple(kinds)
        self._faults, self._calls = 0, 0
        self._may_be_written = self._is_held = self._is_told = False
        self._lock = RLock()
        self.layouts = [[*buckets], *([replace(bucket, dtype=dtype) for bucket in buckets] for _, dtype in kinds)]
        every = list(chain.from_iterable(self.layouts))
        starts = starts_of(every)
        self.view = PrivateView(pages(starts[-1]))
        flats, offsets = iter(flats_in(self.view.bytes, every)), iter(starts)
        self.rows: Rows = [tuple(next(flats) for _ in layout) for layout in self.layouts]
        self.tensors: Places = {
            kind: self._tensors(layout, [next(offsets) for _ in layout])
            for kind, layout in zip([None, *kinds], self.layouts, strict=True)
        }

    def is_laid_out(self, buckets: Sequence[Bucket], kinds: Sequence[Kind]) -> bool:
        """Whether it is of these."""
        return self._key == (tuple(buckets), tuple(kinds))

    def is_written(self) -> bool:
        """Whether the script has written there, as far as anybody can know. The system looks at each page."""
        return sees_writes() and self.view.is_written()

    def is_found_written(self) -> bool:
        """The same, looked at only after a body with page faults, and now and then for what bodies do not do.

        What is found is told to the others, and stays true until the update is done.
        """
        with self._lock:
            self._is_told = True
            looks = self._is_held or self._may_be_written or self._calls % LOOKS_EVERY == 0
            return looks and self.is_written()

    def body_begins(self) -> None:
        """An update is done: what comes now is the script's."""
        self._is_told, self._faults = False, _page_faults()

    def body_ends(self) -> None:
        """A call begins. Whoever has written to a page for the first time in the body has made a page fault."""
        self._calls += 1
        self._is_told = False
        self._may_be_written = self._faults != _page_faults()

    def show(self, segment: Segment) -> None:
        """Show what lies at the beginning of a segment, in this layout."""
        self.view.show(segment)
        self._is_held = False
        _SHOWING.add(self)

    def keep(self, rows: Rows) -> None:
        """Hold these values from now on, and show nobody's any more."""

        def fill(memory: Tensor) -> None:
            flats = flats_in(memory, list(chain.from_iterable(self.layouts)))
            for flat, values in zip(flats, chain.from_iterable(rows), strict=True):
                flat.copy_(values)

        self.view.hold(fill)
        _SHOWING.discard(self)

    def hold_still(self) -> None:
        """Hold what it shows now. It counts as written: whoever shares it will go on without the others.

        Not in the middle of an update, which goes on from what all were told.
        """
        with self._lock:
            if not self._is_told:
                self.view.hold(lambda memory: memory.copy_(self.view.bytes))
                self._is_held = True
                _SHOWING.discard(self)

    def _tensors(self, layout: Sequence[Bucket], offsets: Sequence[int]) -> tuple[Tensor, ...]:
        placed: dict[int, Tensor] = {}
        for bucket, offset in zip(layout, offsets, strict=True):
            for entry in bucket.entries:
                start = offset + entry.offset * bucket.dtype.itemsize
                flat = self.view.tensor(start, entry.numel, bucket.dtype)
                placed[entry.index] = flat.as_strided(entry.shape, entry.stride)
        return tuple(placed[number] for number in range(len(placed)))


class ScriptMemory:
    """Keeps that memory from generation to generation, so that a script's references into it stay true."""

    def __init__(self) -> None:
        self._shown: ShownState | None = None

    def laid_out(self, buckets: Sequence[Bucket], kinds: Sequence[Kind]) -> ShownState:
        """The memory of these parameters and of each kind of what optimizers keep; as before, if they are."""
        if self._shown is None or not self._shown.is_laid_out(buckets, kinds):
            self._shown = ShownState(buckets, kinds)
        return self._shown


_SHOWING: WeakSet[ShownState] = WeakSet()


def _hold_still() -> None:
    for shown in list(_SHOWING):
        shown.hold_still()


# A process that the script forks has a copy of the weights. Where workers share them it would see them change.
os.register_at_fork(before=_hold_still)
