"""The loaders of a ``Trainer``, as a run reads them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from math import ceil
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler
from transformers.trainer_utils import seed_worker

from unisono.errors import DataError


class GlobalBatches(Sampler[list[int]]):
    """Global batches: as many batches of a loader as the trainer accumulates gradients over.

    Args:
        batches: the loader's batch sampler.
        accumulated: the number of its batches in a global batch.
    """

    def __init__(self, batches: Any, accumulated: int) -> None:
        self.batches, self.accumulated = batches, accumulated

    def __iter__(self) -> Iterator[list[int]]:
        """The samples of each."""
        batches = iter(self.batches)
        while group := list(islice(batches, self.accumulated)):
            yield [sample for batch in group for sample in batch]

    def __len__(self) -> int:
        """The number of global batches in an epoch."""
        return ceil(len(self.batches) / self.accumulated)

    def set_epoch(self, epoch: int) -> None:
        """Nothing of this one's own depends on it."""


def read_by_run(loader: Any, accumulated: int = 1) -> DataLoader[Any]:
    """A plain loader of the same batches, or of those of several accumulated.

    Args:
        loader: the loader that the trainer has made, or a script in its place; prepared by accelerate or not.
        accumulated: the number of its batches in one of the result's.

    Raises:
        DataError: it reads a stream, or makes no batches.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} is read from front to back, and samples are distributed among workers by their "
            f"numbers: give the trainer a map-style data set, such as datasets.Dataset; a finite stream becomes one "
            f"with list(stream)"
        )
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        raise DataError("the loader makes no batches (batch_size=None): give it per_device_train_batch_size")
    first = loader.worker_init_fn
    return DataLoader(
        dataset,
        batch_sampler=batches if accumulated == 1 else GlobalBatches(batches, accumulated),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        timeout=loader.timeout,
        # Transformers' own would seed by the worker's rank; the run seeds each sample.
        worker_init_fn=None if isinstance(first, partial) and first.func is seed_worker else first,
        multiprocessing_context=loader.multiprocessing_context,
    )
