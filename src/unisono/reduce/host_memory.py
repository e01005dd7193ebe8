"""The memory that the workers of one host share, and how they meet over it."""

import mmap
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import psutil
import torch
from torch import Tensor

from unisono.errors import JobError
from unisono.plan.split import even_bounds
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.buckets import ALIGNMENT, Bucket
from unisono.reduce.peers import Peers
from unisono.reduce.transport import SharedFlats

PAGE = 4096


class Segment:
    """Anonymous shared memory, mapped by all workers of this host.

    Args:
        descriptor: the memory's file descriptor; taken over and closed.
        size: the size in bytes.

    Attributes:
        bytes: the memory, 1-D uint8.
        copy: a private copy of it: what is written here, nobody else sees (the kernel copies on write).
    """

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            self._map = mmap.mmap(descriptor, size)
            self._copy = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.copy: Tensor = torch.frombuffer(self._copy, dtype=torch.uint8)

    def refresh(self) -> None:
        """Forget what was written to the copy: it is again as the memory is."""
        self._copy.madvise(mmap.MADV_DONTNEED)

    def is_written(self) -> bool:
        """Whether anything was written to the copy, whatever it was.

        Raises:
            OSError: the system does not say.
        """
        return _has_pages_of_its_own(self.copy)


PRESENT, SWAPPED, IN_A_FILE = 63, 62, 61
"""Bits of an entry of ``/proc/self/pagemap``."""


def _has_pages_of_its_own(memory: Tensor) -> bool:
    """Whether pages of private memory are no longer those of the file behind it."""
    with open("/proc/self/pagemap", "rb", buffering=0) as table:  # noqa: PTH123  a path would be asked for its kind first
        told = os.pread(table.fileno(), memory.numel() // PAGE * 8, memory.data_ptr() // PAGE * 8)
    entries = np.frombuffer(told, dtype=np.uint64)
    is_there = (entries >> np.uint64(SWAPPED)) != 0
    return bool((is_there & ((entries >> np.uint64(IN_A_FILE)) & np.uint64(1) == 0)).any())


@cache
def sees_writes() -> bool:
    """Whether this system says which pages of private memory were written. Some containers have none of its tables."""
    try:
        descriptor = os.memfd_create("unisono", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE)
        segment = Segment(descriptor, PAGE)
        int(segment.copy[0])
        before = segment.is_written()
        segment.copy[0] = 1
        return not before and segment.is_written()
    except (OSError, ValueError):
        return False


def share_segments(peers: Peers, sizes: Sequence[int]) -> list[Segment]:
    """One segment per worker, mapped by all; collective.

    Args:
        peers: the workers of this host.
        sizes: bytes of each worker's segment, by rank; multiples of a page.

    Raises:
        JobError: there is too little memory for this worker's segment; says how much is needed and what to do.
    """
    own = _created(sizes[peers.rank])
    received = peers.exchange_descriptors(own) | {peers.rank: own}
    return [Segment(received[rank], sizes[rank]) for rank in range(len(sizes))]


def _created(size: int) -> int:
    available = psutil.virtual_memory().available
    if size > available:
        raise JobError(
            f"the workers of this host need {size / 2**20:.0f} MiB of shared memory each, and {available / 2**20:.0f} "
            f"MiB are free: start fewer workers on this host, or unisono.init(transport='process_group')"
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

    def share(self, buckets: Sequence[Bucket]) -> SharedFlats:
        """Flat buffers of zeros, one for all. Collective."""
        size = sum(_padded(bucket) for bucket in buckets)
        segments = share_segments(self._peers, [pages(0 if rank else size) for rank in range(len(self._covers))])
        segment = segments[0]
        is_written = segment.is_written if sees_writes() else None
        return SharedFlats(_row(segment.bytes, buckets, 0), _row(segment.copy, buckets, 0), is_written)

    def part(self, numel: int) -> range:
        """The elements of a flat buffer that are this worker's to change."""
        return part_of(numel, self._peers.rank, len(self._covers))

    def private(self, total: Tensor) -> Tensor:
        """A result as it is now, in memory that this worker may change."""
        if total.data_ptr() not in self._twins:
            return total
        pool, twin = self._twins[total.data_ptr()]
        pool.segment.refresh()
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
        segment: the segment of the result and its twins.
    """

    rows: list[list[tuple[Tensor, ...]]]
    result: tuple[Tensor, ...]
    twins: tuple[Tensor, ...]
    segment: Segment

    @classmethod
    def shared(cls, peers: Peers, buckets: Sequence[Bucket], rows: Sequence[int]) -> "_Pool":
        """A new pool, with so many rows for each worker; the result lies behind rank 0's rows. Collective."""
        row_bytes = sum(_padded(bucket) for bucket in buckets)
        sizes = [pages((count + (rank == 0)) * row_bytes) for rank, count in enumerate(rows)]
        segments = share_segments(peers, sizes)
        views = [
            [_row(segment.bytes, buckets, number * row_bytes) for number in range(count)]
            for segment, count in zip(segments, rows, strict=True)
        ]
        first, behind = segments[0], rows[0] * row_bytes
        return cls(views, _row(first.bytes, buckets, behind), _row(first.copy, buckets, behind), first)


def _padded(bucket: Bucket) -> int:
    size = bucket.numel * bucket.dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def _row(memory: Tensor, buckets: Sequence[Bucket], offset: int) -> tuple[Tensor, ...]:
    starts = [offset]
    for bucket in buckets:
        starts.append(starts[-1] + _padded(bucket))
    return tuple(
        elements(memory, start, bucket.numel, bucket.dtype)
        for bucket, (start, _) in zip(buckets, pairwise(starts), strict=True)
    )
