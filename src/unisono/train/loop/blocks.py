"""The blocks of an evaluation: which of them a worker reads, and in which order results of all are put together."""

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
from unisono.data.loader import load
from unisono.data.shards import ShardsRequest
from unisono.data.stream_feed import StreamFeed, warn_unless_promised
from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import Wish
from unisono.errors import DataError
from unisono.plan.epoch_cut import EpochCut
from unisono.plan.split import even_bounds
from unisono.received import value_of
from unisono.train.group.workers import Workers

EVALUATION_EPOCH = -1
"""Samples that are evaluated draw from streams of their own, the same in every evaluation."""

NO_LOOP = -1
"""The loop that a loader's order follows from in evaluations."""

BlockPlace = tuple[int, ...]
"""Of a block among all. They can be compared."""


class EvaluatedBlock(NamedTuple):
    """Some samples that are evaluated together.

    Attributes:
        place: its place among all; neighbouring ranks have neighbouring places. What is drawn follows from it.
        number: its number, which may be known before that of all blocks.
        samples: the number of its samples.
        batch: the samples, collated.
    """

    place: BlockPlace
    number: int
    samples: int
    batch: Any


@dataclass(frozen=True, slots=True)
class Shares:
    """Who has evaluated how much.

    Attributes:
        sizes: the numbers of samples of each rank's blocks, in the order of places.
        order: the row of each sample among those of all blocks, in the order of the data; None if that is the same.
    """

    sizes: Sequence[Sequence[int]]
    order: Tensor | None = None


class Blocks(Protocol):
    """The blocks of an evaluation, the same on any number of workers."""

    def read(self, workers: Workers, most: int | None = None) -> Generator[EvaluatedBlock, None, None]:
        """This worker's blocks.

        Args:
            workers: the workers that share them.
            most: the number behind the last block; None for all.
        """

    def shares(self, workers: Workers, read: Sequence[tuple[BlockPlace, int]]) -> Shares:
        """Who has evaluated how much. May be a collective call.

        Args:
            workers: the workers that have shared the blocks.
            read: the place and the samples of each block of this worker, in the order of places.

        Raises:
            DataError: there is nothing.
        """


@dataclass(frozen=True, slots=True)
class CutBlocks:
    """The blocks of data that are read by index: neighbours go to one worker.

    Attributes:
        feed: what is read, and how.
        cut: the cut into blocks.
    """

    feed: Feed
    cut: EpochCut

    def read(self, workers: Workers, most: int | None = None) -> Generator[EvaluatedBlock, None, None]:
        """This worker's blocks; see :class:`Blocks`."""
        numbers = self._of(workers.rank, workers, most)
        blocks = [self.cut.batch(number) for number in numbers]
        requests = (ShardsRequest(EVALUATION_EPOCH, (block,)) for block in blocks)
        with closing(load(self.feed.source, requests, self.feed.processes)) as loaded:
            for number, block in zip(numbers, blocks, strict=True):
                (batch,) = next(loaded)
                yield EvaluatedBlock((number,), number, len(block), batch)

    def shares(self, workers: Workers, read: Sequence[tuple[BlockPlace, int]]) -> Shares:
        """Who has evaluated how much: that is known beforehand."""
        ranks = range(workers.world_size)
        return Shares([[len(self.cut.batch(number)) for number in self._of(rank, workers)] for rank in ranks])

    def _of(self, rank: int, workers: Workers, most: int | None = None) -> range:
        steps = self.cut.steps if most is None else min(most, self.cut.steps)
        bounds = even_bounds(steps, workers.world_size)
        return range(bounds[rank], bounds[rank + 1])


@dataclass(frozen=True, slots=True)
class StreamBlocks:
    """The blocks of a stream, which its readers give in turn. Neighbouring readers go to one worker.

    Where all readers read the same, and each takes every so many-th sample, the order is that of the stream.

    Attributes:
        feed: what is read, and how.
        readers: the number of readers, one for each shard of the job.
        size: the number of samples in a block; fewer where a reader comes to its end.
    """

    feed: StreamFeed
    readers: int
    size: int

    def read(self, workers: Workers, most: int | None = None) -> Generator[EvaluatedBlock, None, None]:
        """This worker's blocks; see :class:`Blocks`."""
        states = dict.fromkeys(_readers_of(self.readers, workers.rank, workers), ReaderState())
        turn = 0
        with closing(self.feed.source(self.readers)) as source:
            open_ones = set(states)
            while open_ones and (most is None or turn * self.readers + min(open_ones) < most):
                wishes = [Wish(0, number, at, self.size) for number, at in states.items()]
                for wish, given in zip(wishes, source.read(wishes), strict=True):
                    number = turn * self.readers + wish.number
                    if given.samples and (most is None or number < most):
                        yield EvaluatedBlock((wish.number, turn), number, given.samples, source.batch(wish))
                    states[wish.number] = given.after
                    if given.is_over:
                        open_ones.discard(wish.number)
                turn += 1

    def shares(self, workers: Workers, read: Sequence[tuple[BlockPlace, int]]) -> Shares:
        """Who has evaluated how much: workers tell each other."""
        mine = _readers_of(self.readers, workers.rank, workers)
        given = dict.fromkeys(mine, 0)
        for (reader, _), samples in read:
            given[reader] += samples
        told = value_of(list[list[int]], workers.gather_json(list(given.values())), "what readers have given")
        counts = list(chain.from_iterable(told))
        if not sum(counts):
            raise DataError("the stream is empty: check the path, the split or the filter it was made with")
        warn_unless_promised("the stream", sum(counts), self.feed.promised)
        sizes = [[size for count in each for size in self._sizes(count)] for each in told]
        places = [torch.arange(count) * self.readers + number for number, count in enumerate(counts)]
        return Shares(sizes, torch.cat(places).argsort())

    def _sizes(self, count: int) -> list[int]:
        whole, rest = divmod(count, self.size)
        return [self.size] * whole + [rest] * bool(rest)


class Read(NamedTuple):
    """What a worker has read of the stream.

    Attributes:
        samples: the number of samples of each batch.
        digest: what tells the batches from others.
    """

    samples: Sequence[int]
    digest: int


@dataclass(frozen=True, slots=True)
class BatchBlocks:
    """The batches of a stream, which its readers take in turn. Neighbouring readers go to one worker.

    Attributes:
        stream: the stream.
        readers: the number of readers, one for each shard of the job.
    """

    stream: BatchStream
    readers: int
    _read: list[Read] = field(default_factory=list, init=False)

    def read(self, workers: Workers, most: int | None = None) -> Generator[EvaluatedBlock, None, None]:
        """This worker's blocks; see :class:`~unisono.train.loop.blocks.Blocks`."""
        mine, samples, digest = _readers_of(self.readers, workers.rank, workers), list[int](), 0
        if most == 0:
            return
        here = OpenPass(self.stream, 0)
        while here.batch is not None and (most is None or here.done < most):
            turn, reader = divmod(here.done, self.readers)
            samples.append(here.batch.samples)
            digest = crc32(here.batch.digest.to_bytes(4), digest)
            if reader in mine:
                yield EvaluatedBlock((reader, turn), here.done, here.batch.samples, here.batch.value)
            else:
                workers.tick()
            here.go_on()
        self._read[:] = [Read(samples, digest)]

    def shares(self, workers: Workers, read: Sequence[tuple[BlockPlace, int]]) -> Shares:
        """Who has evaluated how much: all have read the same, and compare it."""
        (mine,) = self._read
        digests = value_of(list[int], workers.gather_json(mine.digest), "what workers have read")
        if odd := [rank for rank, one in enumerate(digests) if one != digests[0]]:
            raise DataError(
                f"{self.stream.name} gave rank {odd[0]} other batches than rank 0 in an evaluation. It has to give the "
                f"same ones on all workers: {self.stream.cure}"
            )
        if not sum(mine.samples):
            raise DataError(f"{self.stream.name} is empty: check the path, the split or the filter it was made with")
        ranks = [self._numbers(rank, workers) for rank in range(workers.world_size)]
        starts = [0, *accumulate(mine.samples)]
        rows = [torch.arange(starts[number], starts[number + 1]) for numbers in ranks for number in numbers]
        sizes = [[mine.samples[number] for number in numbers] for numbers in ranks]
        return Shares(sizes, torch.cat(rows).argsort())

    def _numbers(self, rank: int, workers: Workers) -> list[int]:
        """The batches of a rank, in the order of places."""
        batches, readers = len(self._read[0].samples), _readers_of(self.readers, rank, workers)
        return [number for reader in readers for number in range(reader, batches, self.readers)]


def _readers_of(readers: int, rank: int, workers: Workers) -> range:
    bounds = even_bounds(readers, workers.world_size)
    return range(bounds[rank], bounds[rank + 1])
