"""The transport between workers of one host: partial sums are added where they lie, in shared memory."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from unisono.plan.split import Split, even_bounds
from unisono.plan.tree import Node, SummationTree, children
from unisono.reduce.buckets import ALIGNMENT, Bucket
from unisono.reduce.peers import LARGEST_MESSAGE, Peers
from unisono.reduce.segments import Segment, elements, pages, share_segments
from unisono.reduce.transport import Transport

PIECE = 128 * 1024
"""Elements that are added at a time, so that what is added next is still in the cache."""


class SharedMemoryTransport(Transport):
    """Every worker writes its partial sums into memory that all share, and adds its part of the tree over all of them.

    A reduction has two meetings, each a small message to every peer: when all partial sums are written, and when all
    parts of the result are. Nothing is copied through a socket, and nobody waits busily.

    Args:
        peers: the other workers, all on this host.
        rank: of this worker.
        split: which shards each worker computes.
    """

    def __init__(self, peers: Peers, rank: int, split: Split) -> None:
        super().__init__(rank, split)
        self._peers = peers
        self._places: dict[int, _Place] = {}
        self._twins: dict[int, tuple[_Pool, Tensor]] = {}
        self._scratch: dict[tuple[Hashable, int, torch.dtype], _Pool] = {}

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Rows in shared memory."""
        pool = self._pool(buckets, rows)
        mine = pool.rows[self.rank]
        for total, twin in zip(pool.result, pool.twins, strict=True):
            self._twins[total.data_ptr()] = pool, twin
        for number, row in enumerate(mine):
            for bucket, flat in enumerate(row):
                self._places[flat.data_ptr()] = _Place(pool, number, bucket)
        return mine

    def reduce(self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None) -> Tensor:
        """Meet, add this worker's part of the tree over everybody's partial sums, meet."""
        places = [self._places.get(partial.data_ptr()) for partial in partials]
        if any(place is None for place in places):
            places = list(self._copied(bucket, partials))
        known = [place for place in places if place is not None]
        pool, number = known[0].pool, known[0].bucket
        told = self._peers.exchange(bytes(place.row for place in known))
        leaves = {
            node: pool.rows[rank][row][number]
            for rank in range(self.world_size)
            for node, row in zip(self._cover(rank), told[rank], strict=True)
        }
        self._add(leaves, pool.result[number], divisor)
        self._peers.exchange(b"")
        return pool.result[number]

    def share(self, buckets: Sequence[Bucket]) -> tuple[Tensor, ...]:
        """In the first worker's memory."""
        size = sum(_padded(bucket) for bucket in buckets)
        segments = share_segments(self._peers, [pages(0 if rank else size) for rank in range(self.world_size)])
        return _row(segments[0].bytes, buckets, 0)

    def part(self, numel: int) -> range:
        """The part that this worker adds."""
        bounds = even_bounds(numel // ALIGNMENT, self.world_size)
        return range(bounds[self.rank] * ALIGNMENT, bounds[self.rank + 1] * ALIGNMENT)

    def private(self, total: Tensor) -> Tensor:
        """A copy that costs nothing until it is written to."""
        if total.data_ptr() not in self._twins:
            return total
        pool, twin = self._twins[total.data_ptr()]
        pool.segment.refresh()
        return twin

    def reduce_native(self, total: Tensor) -> Tensor:
        """Not this transport's: a native reduction is a backend's own."""
        raise NotImplementedError("a native reduction goes over the process group")

    def all_gather(self, row: Tensor) -> Tensor:
        """Small rows travel as messages, large ones through memory that is given back at once."""
        data = row.contiguous().view(-1).view(torch.uint8)
        if data.numel() == 0:
            return row.new_empty((self.world_size, 0))
        if data.numel() <= LARGEST_MESSAGE:
            told = self._peers.exchange(data.numpy().tobytes())
            joined = bytearray().join(told[rank] for rank in range(self.world_size))
            rows = torch.frombuffer(joined, dtype=torch.uint8)
        else:
            rows = self._through_memory(data, range(self.world_size))
        return rows.view(row.dtype).reshape(self.world_size, row.numel())

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Through memory that is given back at once, or as a message."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.numel() == 0:
            return
        if data.numel() <= LARGEST_MESSAGE:
            message = data.numpy().tobytes() if self.rank == source else b""
            received = torch.frombuffer(bytearray(self._peers.exchange(message)[source]), dtype=torch.uint8)
        else:
            received = self._through_memory(data, [source])
        if self.rank != source:
            with torch.no_grad():
                tensor.copy_(received.view(tensor.dtype).view(tensor.shape))

    def close(self) -> None:
        """Hang up, and let go of the memory."""
        self._peers.close()
        self._places.clear()
        self._twins.clear()
        self._scratch.clear()

    def _cover(self, rank: int) -> tuple[Node, ...]:
        mine = self.split.of(rank)
        return self.tree.cover(mine.start, mine.stop)

    def _pool(self, buckets: Sequence[Bucket], rows: int) -> "_Pool":
        told = self._peers.exchange(bytes([rows]))
        return _Pool.shared(self._peers, buckets, [told[rank][0] for rank in range(self.world_size)])

    def _copied(self, bucket: Hashable, partials: Sequence[Tensor]) -> list["_Place"]:
        first = partials[0]
        key = (bucket, first.numel(), first.dtype)
        if key not in self._scratch:
            layout = Bucket((), first.numel(), first.dtype, first.device)
            self._scratch[key] = self._pool([layout], len(partials))
        pool = self._scratch[key]
        for row, partial in zip(pool.rows[self.rank], partials, strict=True):
            row[0].copy_(partial)
        return [_Place(pool, number, 0) for number in range(len(partials))]

    def _add(self, leaves: dict[Node, Tensor], result: Tensor, divisor: float | None) -> None:
        mine = self.part(result.numel())
        for begin in mine[::PIECE]:
            part = slice(begin, min(begin + PIECE, mine.stop))
            _finish(self.tree, {node: value[part] for node, value in leaves.items()}, result[part], divisor)

    def _through_memory(self, data: Tensor, sources: Sequence[int]) -> Tensor:
        sizes = [pages(data.numel() if rank in sources else 0) for rank in range(self.world_size)]
        segments = share_segments(self._peers, sizes)
        if self.rank in sources:
            segments[self.rank].bytes[: data.numel()].copy_(data)
        self._peers.exchange(b"")
        return torch.cat([segments[rank].bytes[: data.numel()] for rank in sources])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a partial sum lies."""

    pool: "_Pool"
    row: int
    bucket: int


@dataclass(frozen=True, slots=True)
class _Pool:
    """The shared memory of some buckets.

    Attributes:
        rows: for each worker, its rows of flat buffers.
        result: a flat buffer per bucket, in which every worker fills its part.
        twins: copies of the result that this worker may write to.
        segment: of the result and its twins.
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


def _finish(tree: SummationTree, leaves: dict[Node, Tensor], result: Tensor, divisor: float | None) -> None:
    # Only this worker reads this part of anybody's partial sums, so inner nodes may be added in place.
    left, right = (tree.finish(leaves, lambda a, b: a.add_(b), half) for half in children(tree.root))
    torch.add(left, right, out=result)
    if divisor is not None:
        result.div_(divisor)
