"""Reads one worker's shards, ahead of the steps that need them."""

import multiprocessing
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from unisono.data.shards import ShardRequest, ShardSource

# Other ways to start a process run the script again from its first line.
_CONTEXT = "fork" if "fork" in multiprocessing.get_all_start_methods() else None


class ShardLoader:
    """Yields, for each step, the batches of this worker's shards.

    Args:
        source: where shards come from.
        requests: for each step, one request per shard of this worker. Consumed lazily.
        workers: processes that load ahead; 0 loads in this process when a batch is asked for.
    """

    def __init__(self, source: ShardSource, requests: Iterator[Sequence[ShardRequest]], workers: int) -> None:
        self._source = source
        self._requests = requests
        self._workers = workers

    def __iter__(self) -> Generator[list[Any], None, None]:
        if self._workers == 0:
            for shards in self._requests:
                yield [self._source[shard] for shard in shards]
            return
        counts: list[int] = []
        loader = DataLoader(
            self._source,
            batch_size=None,
            sampler=_Requests(self._requests, counts),
            num_workers=self._workers,
            collate_fn=_unchanged,
            multiprocessing_context=_CONTEXT,
            # DataLoader draws its base seed from here, not from the script's own stream.
            generator=torch.Generator(),
        )
        batches = iter(loader)
        try:
            yield from _grouped(batches, counts)
        finally:
            _shut_down(batches)


class _Requests(Sampler[ShardRequest]):
    """The requests of all steps in a row; notes how many belong to each step."""

    def __init__(self, requests: Iterator[Sequence[ShardRequest]], counts: list[int]) -> None:
        self._requests = requests
        self._counts = counts

    def __iter__(self) -> Iterator[ShardRequest]:
        for shards in self._requests:
            self._counts.append(len(shards))
            yield from shards


def _grouped(batches: Iterator[Any], counts: list[int]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == counts[0]:
            counts.pop(0)
            yield group
            group = []


def _unchanged(batch: Any) -> Any:
    return batch


def _shut_down(batches: Any) -> None:
    # A loop that is left early must not leave loader processes until the garbage collector comes by.
    shutdown = getattr(batches, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()
