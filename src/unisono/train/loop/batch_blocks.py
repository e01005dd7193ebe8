"""The blocks of an evaluation on a stream of batches: each batch is one, and all workers read all of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

import torch

from unisono.data.batch_stream import BatchStream, OpenPass
from unisono.errors import DataError
from unisono.plan.split import even_bounds
from unisono.received import value_of
from unisono.train.group.workers import Workers
from unisono.train.loop.blocks import BlockPlace, EvaluatedBlock, Shares


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
        mine, samples, digest = self._of(workers.rank, workers), list[int](), 0
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
        batches, readers = len(self._read[0].samples), self._of(rank, workers)
        return [number for reader in readers for number in range(reader, batches, self.readers)]

    def _of(self, rank: int, workers: Workers) -> range:
        bounds = even_bounds(self.readers, workers.world_size)
        return range(bounds[rank], bounds[rank + 1])
