"""The memory that the workers of one host share, and how they meet over it."""

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.plan.split import even_bounds
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.buckets import ALIGNMENT, Bucket
from unisono.reduce.peers import Peers
from unisono.reduce.segment import PrivateView, Segment, created, flats_in, pages, starts_of


def share_segments(peers: Peers, sizes: Sequence[int]) -> list[Segment]:
    """One segment per worker, mapped by all; collective.

    Args:
        peers: the workers of this host.
        sizes: bytes of each worker's segment, by rank; multiples of a page.

    Raises:
        JobError: there is too little memory for this worker's segment; says how much is needed and what to do.
    """
    own = created(sizes[peers.rank])
    try:
        received = peers.exchange_descriptors(own) | {peers.rank: own}
    except BaseException:
        os.close(own)
        raise
    return [Segment(received[rank], sizes[rank]) for rank in range(len(sizes))]


class HostMemory:
    """Rows of partial sums of all workers of one host, and a result per bucket, where all of them see them.

    Args:
        peers: the workers of this host; their ranks count from 0 on this host.
        tree: the summation tree over the shards of all hosts.
        shards: the shards of each of this host's workers.
    """

    def __init__(self, peers: Peers, tree: SummationTree, shards: Sequence[range]) -> None:
        self._peers = peers
        self._covers = [tree.cover(mine.start, mine.stop) for mine in shards]
        self._places: dict[int, _Place] = {}
        self._twins: dict[int, tuple[_Pool, Tensor]] = {}
        self._scratch: dict[tuple[Hashable, int, torch.dtype], _Pool] = {}

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """So many rows for this worker; others may want another number. Collective."""
        pool = self._pool(buckets, rows)
        mine = pool.rows[self._peers.rank]
        for total, twin in zip(pool.result, pool.twins, strict=True):
            self._twins[total.data_ptr()] = pool, twin
        for number, row in enumerate(mine):
            for bucket, flat in enumerate(row):
                self._places[flat.data_ptr()] = _Place(pool, number, bucket)
        return mine

    def part(self, numel: int) -> range:
        """The elements of a flat buffer that are this worker's to change."""
        return part_of(numel, self._peers.rank, len(self._covers))

    def private(self, total: Tensor) -> Tensor:
        """A result as it is now, in memory that this worker may change."""
        if total.data_ptr() not in self._twins:
            return total
        pool, twin = self._twins[total.data_ptr()]
        pool.view.refresh()
        return twin

    def gather(self, bucket: Hashable, partials: Sequence[Tensor]) -> "Gathered":
        """Wait until all workers of this host have written their partial sums of a bucket. Collective.

        Args:
            bucket: names the bucket.
            partials: this worker's, from left to right; copied if they are not in a row that was allocated here. From a
                worker without shards one that tells which bucket it is.

        Returns:
            everybody's partial sums, and the buffer for the result.
        """
        places = [self._places.get(partial.data_ptr()) for partial in partials]
        if any(place is None for place in places):
            places = list(self._copied(bucket, partials))
        known = [place for place in places if place is not None]
        pool, number = known[0].pool, known[0].bucket
        own = self._covers[self._peers.rank]
        told = self._peers.exchange(bytes(place.row for place, _ in zip(known, own, strict=False)))
        leaves = {
            node: pool.rows[rank][row][number]
            for rank, cover in enumerate(self._covers)
            for node, row in zip(cover, told[rank], strict=True)
        }
        rows = b"".join(told[rank] for rank in range(len(self._covers)))
        return Gathered((id(pool), number, rows), leaves, pool.result[number])

    def meet(self) -> None:
        """Wait until all workers of this host are here."""
        self._peers.exchange(b"")

    def forget(self) -> None:
        """Let go of all of it."""
        self._places.clear()
        self._twins.clear()
        self._scratch.clear()

    def _pool(self, buckets: Sequence[Bucket], rows: int) -> "_Pool":
        told = self._peers.exchange(bytes([rows]))
        return _Pool.shared(self._peers, buckets, [told[rank][0] for rank in range(len(self._covers))])

    def _copied(self, bucket: Hashable, partials: Sequence[Tensor]) -> list["_Place"]:
        first = partials[0]
        key = (bucket, first.numel(), first.dtype)
        if key not in self._scratch:
            layout = Bucket((), first.numel(), first.dtype, first.device)
            self._scratch[key] = self._pool([layout], len(partials))
        pool = self._scratch[key]
        for row, partial in zip(pool.rows[self._peers.rank], partials, strict=True):
            row[0].copy_(partial)
        return [_Place(pool, number, 0) for number in range(len(partials))]


def part_of(numel: int, number: int, parts: int) -> range:
    """The elements of one of so many parts of a flat buffer, whose ends are aligned."""
    bounds = even_bounds(numel // ALIGNMENT, parts)
    return range(bounds[number] * ALIGNMENT, bounds[number + 1] * ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The partial sums of a bucket, as all workers of this host have written them.

    Attributes:
        place: a key that is equal for equal places in memory.
        partials: the partial sums by node of the tree.
        result: the buffer for the result.
    """

    place: tuple[int, int, bytes]
    partials: dict[Node, Tensor]
    result: Tensor


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a partial sum in shared memory."""

    pool: "_Pool"
    row: int
    bucket: int


@dataclass(frozen=True, slots=True)
class _Pool:
    """The shared memory of some buckets.

    Attributes:
        rows: the rows of flat buffers of each worker.
        result: a flat buffer per bucket, in which every worker fills its part.
        twins: copies of the result that this worker may write to.
        view: the memory of the twins.
    """

    rows: list[list[tuple[Tensor, ...]]]
    result: tuple[Tensor, ...]
    twins: tuple[Tensor, ...]
    view: PrivateView

    @classmethod
    def shared(cls, peers: Peers, buckets: Sequence[Bucket], rows: Sequence[int]) -> "_Pool":
        """A new pool, with so many rows for each worker; the result lies behind rank 0's rows. Collective."""
        row_bytes = starts_of(buckets)[-1]
        sizes = [pages((count + (rank == 0)) * row_bytes) for rank, count in enumerate(rows)]
        segments = share_segments(peers, sizes)
        views = [
            [flats_in(segment.bytes, buckets, number * row_bytes) for number in range(count)]
            for segment, count in zip(segments, rows, strict=True)
        ]
        first, behind = segments[0], rows[0] * row_bytes
        view = PrivateView(first, sizes[0])
        return cls(views, flats_in(first.bytes, buckets, behind), flats_in(view.bytes, buckets, behind), view)
