"""The memory that the workers of one host share, and how they meet over it."""

import mmap
import os
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import psutil
import torch
from torch import Tensor

from unisono.errors import JobError
from unisono.plan.split import even_bounds
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.buckets import ALIGNMENT, Bucket
from unisono.reduce.peers import Peers

PAGE = 4096


class Segment:
    """Anonymous shared memory, mapped by all workers of this host.

    Args:
        descriptor: the memory's file descriptor; taken over, and closed with this object.

    Attributes:
        bytes: the memory, 1-D uint8.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map = mmap.mmap(descriptor, size)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)


class PrivateView:
    """Memory of this worker alone that shows the beginning of a segment, until somebody writes here: then it differs.

    Args:
        size: the size in bytes, a multiple of a page.

    Attributes:
        bytes: the memory, 1-D uint8.
    """

    def __init__(self, segment: Segment, size: int) -> None:
        self._map = mmap.mmap(segment.descriptor, size, flags=mmap.MAP_PRIVATE)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def refresh(self) -> None:
        """Forget the writes to this copy: it equals its origin again."""
        self._map.madvise(mmap.MADV_DONTNEED)


def created(size: int) -> int:
    """The file descriptor of new shared memory.

    Raises:
        JobError: there is too little memory for it; says how much is needed and what to do.
    """
    available = psutil.virtual_memory().available
    if size > available:
        raise JobError(
            f"the workers of this host need {size / 2**20:.0f} MiB of shared memory each, and {available / 2**20:.0f} "
            f"MiB are free: start fewer workers on this host, or unisono.init(communication={{'transport': 'sockets'}})"
        )
    # Not /dev/shm: this memory has no name, needs no space set aside, and is gone with its last user.
    descriptor = os.memfd_create("unisono", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def elements(memory: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A 1-D view of ``numel`` elements from byte ``offset`` of a segment's memory on."""
    return memory[offset : offset + numel * dtype.itemsize].view(dtype)


def pages(size: int) -> int:
    """``size`` bytes, rounded up to whole pages, one at least."""
    return max(1, -(-size // PAGE)) * PAGE


def padded(bucket: Bucket) -> int:
    """The bytes of a bucket's flat buffer in a segment."""
    size = bucket.numel * bucket.dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def starts_of(buckets: Sequence[Bucket], offset: int = 0) -> list[int]:
    """The byte at which each bucket's flat buffer starts, and the one behind the last."""
    starts = [offset]
    for bucket in buckets:
        starts.append(starts[-1] + padded(bucket))
    return starts


def flats_in(memory: Tensor, buckets: Sequence[Bucket], offset: int = 0) -> tuple[Tensor, ...]:
    """Flat buffers one behind the other, from byte ``offset`` of a segment's memory on."""
    return tuple(
        elements(memory, start, bucket.numel, bucket.dtype)
        for bucket, (start, _) in zip(buckets, pairwise(starts_of(buckets, offset)), strict=True)
    )


def share_segments(peers: Peers, sizes: Sequence[int]) -> list[Segment]:
    """Share segments of memory, one per worker, mapped by all. Collective.

    ``sizes`` are bytes of each worker's segment, by rank; multiples of a page.

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
        self._gathered: dict[_Where, Gathered] = {}

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Allocate so many rows for this worker; other workers may want other numbers. Collective."""
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
        places = [*filter(None, map(self._places.get, map(Tensor.data_ptr, partials)))]
        if len(places) < len(partials):
            places = self._copied(bucket, partials)
        pool, number = places[0].pool, places[0].bucket
        own = self._covers[self._peers.rank]
        rows = self._peers.exchange(bytes(map(_ROW, places[: len(own)])))
        key = id(pool), number, (*map(rows.__getitem__, range(len(self._covers))),)
        if key not in self._gathered:
            leaves = {
                node: pool.rows[rank][row][number]
                for rank, cover in enumerate(self._covers)
                for node, row in zip(cover, rows[rank], strict=True)
            }
            self._gathered[key] = Gathered(key, leaves, pool.result[number])
        return self._gathered[key]

    def meet(self) -> None:
        """Wait until all workers of this host are here."""
        self._peers.exchange(b"")

    def forget(self) -> None:
        """Let go of all of it."""
        self._places.clear()
        self._twins.clear()
        self._scratch.clear()
        self._gathered.clear()

    def _pool(self, buckets: Sequence[Bucket], rows: int) -> "_Pool":
        counts = self._peers.exchange(bytes([rows]))
        return _Pool.shared(self._peers, buckets, [counts[rank][0] for rank in range(len(self._covers))])

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


_Where = tuple[int, int, tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The partial sums of a bucket, as all workers of this host have written them.

    Attributes:
        place: a key that is equal for equal places in memory.
        partials: the partial sums by node of the tree.
    """

    place: _Where
    partials: dict[Node, Tensor]
    result: Tensor


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a partial sum in shared memory."""

    pool: "_Pool"
    row: int
    bucket: int


_ROW = attrgetter("row")


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
