"""Loaders like those of a script, whose epochs have other batches: some of them, or several in one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import ceil
from typing import Any

from torch.utils.data import DataLoader, Sampler

KEPT = ("num_workers", "collate_fn", "timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context")
"""Settings of a loader that do not say which samples its batches have."""


def like(loader: Any, **others: Any) -> DataLoader[Any]:
    """A plain loader of the same data set with the same settings, but for those that are given."""
    return DataLoader(loader.dataset, **{**{name: getattr(loader, name) for name in KEPT}, **others})


class Cut(Sampler[Any]):
    """Some of the items of each epoch of a sampler, which lie side by side.

    Args:
        sampler: the sampler.
        first: the number of the first item.
        stop: the number of the item behind the last one; None for all.

    Attributes:
        sampler: the sampler.
    """

    def __init__(self, sampler: Any, first: int = 0, stop: int | None = None) -> None:
        self.sampler, self._part = sampler, slice(first, stop)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self._part.start, self._part.stop)

    def __len__(self) -> int:
        """The number of items."""
        return len(range(len(self.sampler))[self._part])

    def set_epoch(self, epoch: int) -> None:
        """It remembers nothing of an epoch; the sampler that it reads may."""


class Grouped(Sampler[list[int]]):
    """Global batches: each is several of a loader's batches. The last one of an epoch may have fewer.

    Args:
        batches: the loader's batch sampler.
        count: the number of its batches in one.
    """

    def __init__(self, batches: Any, count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[list[int]]:
        """The samples of each."""
        batches = iter(self._batches)
        while group := list(islice(batches, self._count)):
            yield [sample for batch in group for sample in batch]

    def __len__(self) -> int:
        """The number of global batches in an epoch."""
        return ceil(len(self._batches) / self._count)

    def set_epoch(self, epoch: int) -> None:
        """Nothing of this one's own depends on it."""
