"""What a script iterates over in place of its loader, and loaders whose batches are global ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from unisono.errors import DataError
from unisono.integrations.kit import Cut, Grouped, like, refused

Read = Callable[["Loader"], Iterator[Any]]
"""Begins a pass over a loader."""


class Loader:
    """Stands for a loader, and is in all but its iteration like it. Its batches are global batches."""

    def __init__(self, loader: DataLoader[Any], read: Read) -> None:
        self.base_dataloader = loader
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        """The batches of this worker's shards, or those that it evaluates."""
        return self._read(self)

    def __len__(self) -> int:
        """The number of global batches; not that of this worker's shards."""
        return len(self.base_dataloader)

    def __getattr__(self, name: str) -> Any:
        if name in ("base_dataloader", "_read"):  # it is being made
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property
    def total_batch_size(self) -> int | None:
        """The number of samples in a global batch; None if nothing says it."""
        return size_of(self.base_dataloader)

    @property
    def total_dataset_length(self) -> int:
        """The number of samples."""
        return len(self.base_dataloader.dataset)  # type: ignore[arg-type]  # a stream that has no length says so

    @property
    def remainder(self) -> int:
        """The number of samples in an epoch's last batch if it is smaller than the others, else 0; -1 if unknown.

        No sample comes twice to fill it up.
        """
        size, dataset = self.total_batch_size, self.base_dataloader.dataset
        if size is None or self.base_dataloader.drop_last or not hasattr(dataset, "__len__"):
            return -1
        return self.total_dataset_length % size

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the run knows the epoch."""

    def behind(self, batches: int) -> Loader:
        """Return the loader without its first batches.

        Raises:
            DataError: it reads a stream.
        """
        if isinstance(self.base_dataloader.dataset, IterableDataset):
            raise DataError(refused("accelerate.skip-of-stream"))
        behind = Cut(self.base_dataloader.batch_sampler, batches)
        return Loader(like(self.base_dataloader, batch_sampler=behind), self._read)


def size_of(loader: DataLoader[Any]) -> int | None:
    """The number of samples in a loader's batch; None if nothing says it."""
    size: int | None = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size


def together(loader: DataLoader[Any], batches: int) -> DataLoader[Any]:
    """A loader each of whose batches is several of another one's."""
    if batches == 1:
        return loader
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        return like(loader, batch_size=loader.batch_size * batches, drop_last=loader.drop_last)
    return like(loader, batch_sampler=Grouped(loader.batch_sampler, batches))


def seeded(loader: DataLoader[Any], seed: int | None) -> DataLoader[Any]:
    """A loader that shuffles by a seed and the epoch alone, as accelerate makes it for ``use_seedable_sampler``.

    ``seed`` is None for that of torch's generator, which ``set_seed`` sets. Samplers of other kinds stay.
    """
    sampler: Any = loader.sampler
    if type(sampler) is not RandomSampler or loader.batch_size is None:
        return loader
    by_seed = SeedableRandomSampler(
        sampler.data_source, replacement=sampler.replacement, num_samples=sampler._num_samples, data_seed=seed
    )
    return like(loader, sampler=by_seed, batch_size=loader.batch_size, drop_last=loader.drop_last)
