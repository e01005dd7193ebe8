"""The blocks of an evaluation: which blocks each worker reads, and in which order their results are put together."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor

from unisono.data.batch_stream import BatchStream, OpenPass
from unisono.data.feed import Feed
from unisono.data.feeds import StreamFeed, warn_unless_promised
from unisono.data.loading import load
from unisono.data.shards import ShardsRequest
from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import Wish
from unisono.errors import DataError
from unisono.plan.batches import EpochCut
from unisono.plan.split import even_bounds
from unisono.received import value_of
from unisono.train.group.workers import Workers

EVALUATION_EPOCH = -1
"""The epoch of evaluations. Evaluated samples draw from streams of their own, the same in every evaluation."""

NO_LOOP = -1
"""The number that stands for a loop where a loader's order in an evaluation is worked out."""

BlockPlace = tuple[int, ...]
"""The place of a block among all. Places can be compared."""


class EvaluatedBlock(NamedTuple):
    """Some samples that are evaluated together.

    Attributes:
        place: the block's place among all, from which draws follow; neighbouring ranks have neighbouring places.
        number: the block's number, which may be known before the number of all blocks.
    """

    place: BlockPlace
    number: int
    samples: int
    batch: Any


@dataclass(frozen=True, slots=True)
class Shares:
    """The amount that each worker has evaluated.

    Attributes:
        sizes: the numbers of samples of each rank's blocks, in the order of places.
        order: the row of each sample among those of all blocks, in the order of the data; None if that is the same.
    """

    sizes: Sequence[Sequence[int]]
    order: Tensor | None = None


class Blocks(Protocol):
    """The blocks of an evaluation, the same on any number of workers."""

    def read(self, workers: Workers, most: int | None = None) -> Generator[EvaluatedBlock, None, None]:
        """Yield this worker's blocks. ``most`` is the number after that of the last block; None for all blocks."""

    def shares(self, workers: Workers, read: Sequence[tuple[BlockPlace, int]]) -> Shares:
        """Return how much each worker has evaluated. May be a collective call.

        ``read`` has the place and the samples of each block of this worker, in the order of places.

        Raises:
            DataError: the data are empty.
        """


@dataclass(frozen=True, slots=True)
class CutBlocks:
    """The blocks of data that are read by index. Each worker gets neighbouring blocks."""

    feed: Feed
    cut: EpochCut

    def read(self, workers: Workers, most: int | None = None) -> Generator[EvaluatedBlock, None, None]:
        """Yield this worker's blocks; see :class:`Blocks`."""
        numbers = self._of(workers.rank, workers, most)
        blocks = [self.cut.batch(number) for number in numbers]
        requests = (ShardsRequest(EVALUATION_EPOCH, (block,)) for block in blocks)
        with closing(load(self.feed.source, requests, self.feed.processes)) as loaded:
            for number, block in zip(numbers, blocks, strict=True):
                (batch,) = next(loaded)
                yield EvaluatedBlock((number,), number, len(block), batch)

    def shares(self, workers: Workers, read: Sequence[tuple[BlockPlace, int]]) -> Shares:
        """Return how much each worker has evaluated, which the cut tells beforehand."""
        ranks = range(workers.world_size)
        return Shares([[len(self.cut.batch(number)) for number in self._of(rank, workers)] for rank in ranks])

    def _of(self, rank: int, workers: Workers, most: int | None = None) -> range:
        steps = self.cut.steps if most is None else min(most, self.cut.steps)
        bounds = even_bounds(steps, workers.world_size)
        return range(bounds[rank], bounds[rank + 1])


@dataclass(frozen=True, slots=True)
class StreamBlocks:
    """The blocks of a stream, which its readers give in turn. Each worker gets neighbouring readers.

    If all readers read the same, and each takes every n-th sample, the order is that of the stream.

    Attributes:
        readers: the number of readers, one for each shard of the job.
        size: the number of samples in a block; fewer where a reader reaches its end.
    """

    feed: StreamFeed
    readers: int
    size: int

    def read(self, workers: Workers, most: int | None = None) -> Generator[EvaluatedBlock, None, None]:
        """Yield this worker's blocks; see :class:`Blocks`."""
        states = dict.fromkeys(_readers_of(self.readers, workers.rank, workers), ReaderState())
        turn = 0
        with closing(self.feed.source(self.readers)) as source:
            unfinished = set(states)
            while unfinished and (most is None or turn * self.readers + min(unfinished) < most):
                wishes = [Wish(0, number, state, self.size) for number, state in states.items()]
                for wish, result in zip(wishes, source.read(wishes), strict=True):
                    number = turn * self.readers + wish.number
                    if result.samples and (most is None or number < most):
                        yield EvaluatedBlock((wish.number, turn), number, result.samples, source.batch(wish))
                    states[wish.number] = result.after
                    if result.is_over:
                        unfinished.discard(wish.number)
                turn += 1

    def shares(self, workers: Workers, read: Sequence[tuple[BlockPlace, int]]) -> Shares:
        """Return how much each worker has evaluated, as workers tell each other."""
        own_readers = _readers_of(self.readers, workers.rank, workers)
        samples_of_reader = dict.fromkeys(own_readers, 0)
        for (reader, _), samples in read:
            samples_of_reader[reader] += samples
        reports = value_of(
            list[list[int]],
            workers.gather_json(list(samples_of_reader.values())),
            "what readers have given",
        )
        counts = list(chain.from_iterable(reports))
        if not sum(counts):
            raise DataError("the stream is empty: check the path, the split or the filter it was made with")
        warn_unless_promised("the stream", sum(counts), self.feed.promised)
        sizes = [[size for count in own_counts for size in self._sizes(count)] for own_counts in reports]
        places = [torch.arange(count) * self.readers + number for number, count in enumerate(counts)]
        return Shares(sizes, torch.cat(places).argsort())

    def _sizes(self, count: int) -> list[int]:
        whole, rest = divmod(count, self.size)
        return [self.size] * whole + [rest] * bool(rest)


class Read(NamedTuple):
    """The batches that a worker has read of the stream."""

    samples: Sequence[int]
    digest: int


@dataclass(frozen=True, slots=True)
class BatchBlocks:
    """The batches of a stream, which its readers take in turn. Each worker gets neighbouring readers.

    There is a reader for each shard of the job.
    """

    stream: BatchStream
    readers: int
    _read: list[Read] = field(default_factory=list, init=False)

    def read(self, workers: Workers, most: int | None = None) -> Generator[EvaluatedBlock, None, None]:
        """Yield this worker's blocks; see :class:`Blocks`."""
        own_readers, samples, digest = _readers_of(self.readers, workers.rank, workers), list[int](), 0
        if most == 0:
            return
        open_pass = OpenPass(self.stream, 0)
        while open_pass.batch is not None and (most is None or open_pass.done < most):
            turn, reader = divmod(open_pass.done, self.readers)
            samples.append(open_pass.batch.samples)
            digest = crc32(open_pass.batch.digest.to_bytes(4), digest)
            if reader in own_readers:
                yield EvaluatedBlock((reader, turn), open_pass.done, open_pass.batch.samples, open_pass.batch.value)
            else:
                workers.tick()
            open_pass.go_on()
        self._read[:] = [Read(samples, digest)]

    def shares(self, workers: Workers, read: Sequence[tuple[BlockPlace, int]]) -> Shares:
        """Return how much each worker has evaluated: all workers have read the same batches, and compare them."""
        (own_read,) = self._read
        digests = value_of(list[int], workers.gather_json(own_read.digest), "what workers have read")
        if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise DataError(
                f"{self.stream.name} gave rank {differing[0]} other batches than rank 0 in an evaluation. It has to "
                f"give the same ones on all workers: {self.stream.cure}"
            )
        if not sum(own_read.samples):
            raise DataError(f"{self.stream.name} is empty: check the path, the split or the filter it was made with")
        ranks = [self._numbers(rank, workers) for rank in range(workers.world_size)]
        starts = [0, *accumulate(own_read.samples)]
        rows = [torch.arange(starts[number], starts[number + 1]) for numbers in ranks for number in numbers]
        sizes = [[own_read.samples[number] for number in numbers] for numbers in ranks]
        return Shares(sizes, torch.cat(rows).argsort())

    def _numbers(self, rank: int, workers: Workers) -> list[int]:
        """The numbers of a rank's batches, in the order of places."""
        batches, readers = len(self._read[0].samples), _readers_of(self.readers, rank, workers)
        return [number for reader in readers for number in range(reader, batches, self.readers)]


def _readers_of(readers: int, rank: int, workers: Workers) -> range:
    bounds = even_bounds(readers, workers.world_size)
    return range(bounds[rank], bounds[rank + 1])
