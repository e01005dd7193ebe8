"""Training loaders that only iterate: every worker reads all of their batches, and takes the parts of its shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from unisono.data.generators import Generators, generators_kept, seed_generators
from unisono.data.shards import ShardSource
from unisono.integrations.lightning.framework import part
from unisono.plan.batches import Batch
from unisono.plan.order import Stream, stream_seed

_DataFetcher: Any = part("loops.fetchers")._DataFetcher


def is_indexed(loader: Any) -> bool:
    """Whether a loader says by numbers which samples a batch has, so that workers load those of their shards alone."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and type(loader).__iter__ is DataLoader.__iter__
    )


class LoaderBatches:
    """The batches of a loader, each pass of which can be begun again.

    What a pass draws from the global random generators follows from the run's seed and the number of the pass.

    Args:
        most: the number of batches of a pass that are given; None for all.
    """

    cure = (
        "it may draw from the global random generators of torch, NumPy and Python, and go by set_epoch; generators of "
        "its own need a seed each time that it is iterated over"
    )

    def __init__(self, loader: Any, seed: int, most: int | None) -> None:
        self.origin, self._seed, self._most = loader, seed, most
        self.name = f"the training loader over a {type(getattr(loader, 'dataset', loader)).__name__}"

    def open_batches(self, number: int) -> Iterator[Any]:
        """Open a pass; see :class:`~unisono.data.batch_stream.BatchStream`."""
        return islice(self._batches(number), self._most)

    def _batches(self, number: int) -> Iterator[Any]:
        for thing in (self.origin, *(getattr(self.origin, name, None) for name in ("dataset", "sampler"))):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(number)
        with generators_kept():
            seed_generators(stream_seed(self._seed, Stream.BATCH, 0, number))
            drawn = Generators.capture()
        batches: Iterator[Any] | None = None
        while True:
            with generators_kept():
                drawn.restore()
                batches = iter(self.origin) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                drawn = Generators.capture()
            yield batch


class StepFetcher(_DataFetcher):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Gives Lightning the steps over a loader that may have no length: none ahead, since the run knows the last one."""

    done: bool

    def __next__(self) -> Any:
        batch = super().__next__()
        self.done = self.done or self.combined_loader.flattened[0].has_ended
        return batch


def whole_of(source: Any, batch: Batch) -> Any:
    """All samples of a global batch, from what loads its shards."""
    if isinstance(source, ShardSource):
        (whole,) = source.of(replace(batch, bounds=(0, batch.size)), [0])
        return whole
    parts = [part for part in source.of(batch, range(batch.shards)) if part is not None]
    return tree_map(lambda first, *others: torch.cat([first, *others]) if isinstance(first, Tensor) else first, *parts)
