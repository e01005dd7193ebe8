"""What a script iterates over in place of its loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from unisono.errors import DataError

Read = Callable[[DataLoader[Any]], Iterator[Any]]
"""Begins a pass over a loader."""


class Loader:
    """Stands for a loader, and is in all but its iteration like it.

    Args:
        loader: the loader, whose batches are global batches.
        read: a function that begins a pass over it.
    """

    def __init__(self, loader: DataLoader[Any], read: Read) -> None:
        self.base_dataloader = loader
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        """The batches of this worker's shards, or those that it evaluates."""
        return self._read(self.base_dataloader)

    def __len__(self) -> int:
        """The number of global batches; not that of this worker's shards."""
        return len(self.base_dataloader)

    def __getattr__(self, name: str) -> Any:
        if name in ("base_dataloader", "_read"):  # it is being made
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the run knows the epoch."""

    def behind(self, batches: int) -> Loader:
        """The same without its first batches.

        Raises:
            DataError: it reads a stream.
        """
        if isinstance(self.base_dataloader.dataset, IterableDataset):
            raise DataError(
                "skip_first_batches of an IterableDataset would read the samples all the same: leave it out, a run "
                "that resumes knows where its streams stand"
            )
        behind = _Behind(self.base_dataloader.batch_sampler, batches)
        return Loader(_like(self.base_dataloader, batch_sampler=behind), self._read)


def size_of(loader: DataLoader[Any]) -> int | None:
    """The number of samples in a loader's batch; None if nothing says it."""
    size: int | None = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size


def together(loader: DataLoader[Any], batches: int) -> DataLoader[Any]:
    """A loader each of whose batches is several of another one's."""
    if batches == 1:
        return loader
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        return _like(loader, batch_size=loader.batch_size * batches, drop_last=loader.drop_last)
    return _like(loader, batch_sampler=_Together(loader.batch_sampler, batches))


def _like(loader: DataLoader[Any], **batches: Any) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        **batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )


class _Batches(Sampler[list[int]]):
    """Another order of the batches of a batch sampler.

    Attributes:
        sampler: the batch sampler.
        number: a number of batches.
    """

    def __init__(self, sampler: Any, number: int) -> None:
        self.sampler, self.number = sampler, number

    @property
    def batch_size(self) -> int | None:
        """The number of samples in a batch, if the sampler says it."""
        return getattr(self.sampler, "batch_size", None)


class _Behind(_Batches):
    """Without the first ones."""

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.number)

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.sampler):
            if number >= self.number:
                yield batch


class _Together(_Batches):
    """Several in one. The last one of an epoch may have fewer."""

    def __len__(self) -> int:
        return ceil(len(self.sampler) / self.number)

    def __iter__(self) -> Iterator[list[int]]:
        found: list[int] = []
        for number, batch in enumerate(self.sampler, start=1):
            found += batch
            if number % self.number == 0:
                yield found
                found = []
        if found:
            yield found
