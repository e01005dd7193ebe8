"""The transport between workers of one host: partial sums are added where they lie, in shared memory."""

from abc import ABC
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import JobMismatch
from unisono.plan.split import Split
from unisono.plan.topology import Links
from unisono.plan.tree import Node, SummationTree, children
from unisono.reduce.buckets import Bucket
from unisono.reduce.host_memory import Gathered, HostMemory, pages, part_of, share_segments
from unisono.reduce.partial_sums import UNTALLIED, Tally
from unisono.reduce.peers import LARGEST_MESSAGE, Peers
from unisono.reduce.transport import PIECE, Transport
from unisono.words import Words


class HostTransport(Transport, ABC):
    """A transport over the memory of a host."""

    def __init__(self, peers: Peers, rank: int, split: Split) -> None:
        super().__init__(rank, split)
        self._peers = peers
        self._memory = self._host_memory()

    @property
    def waits(self) -> bool:
        """Whether this worker waits for another worker of this host."""
        return self._peers.waits

    def resplit(self, split: Split) -> None:
        """Split the shards anew, with new memory."""
        super().resplit(split)
        self._memory.forget()
        self._memory = self._host_memory()

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Rows in this host's shared memory."""
        return self._memory.allocate(buckets, rows)

    def part(self, numel: int) -> range:
        """This worker's elements of a flat buffer that all of its host see: an equal part for each."""
        return self._memory.part(numel)

    def summed(self, numel: int) -> range:
        """Return the elements of a bucket that this worker adds, for its host."""
        return self.part(numel)

    def private(self, total: Tensor) -> Tensor:
        """A copy that costs nothing until it is written to."""
        return self._memory.private(total)

    def _traffic_of(self, total: Tensor, partials: int) -> tuple[int, int]:
        """Return the bytes and messages that others of this host read: parts of the partial sums, and of the total."""
        others, mine = len(self._peers.ranks), len(self.summed(total.numel()))
        partials = partials if self.computes else 0
        return (partials * (total.numel() - mine) + others * mine) * total.itemsize, 2 * others

    def reduce_native(self, total: Tensor) -> Tensor:
        """Refuse: only a backend makes native reductions."""
        raise NotImplementedError("a native reduction goes over the process group")

    def abort(self) -> None:
        """Hang up on this host."""
        self._peers.hang_up()

    def close(self) -> None:
        """Hang up on this host, and let go of the memory."""
        self._peers.close()
        self._memory.forget()

    def _host_memory(self) -> HostMemory:
        first = self.rank - self._peers.rank
        here = range(first, first + len(self._peers.ranks) + 1)
        return HostMemory(self._peers, self.tree, [self.split.of(rank) for rank in here])


# The transport between several hosts with several workers each: shared memory inside, a process group between.


class HierarchicalTransport(HostTransport):
    """Every worker adds its part of a bucket over its host, and finishes it with the workers of equal local rank.

    A host's partial sums are whole subtrees, since its workers have neighbouring shards, so the order of additions is
    the tree's. Between hosts, every element travels once per host and not once per worker. Workers that serve compute
    nothing, and add like all others of their host; a host of servers finishes the sums of the other hosts.

    Args:
        peers: the workers of this host; every host has as many.
        across: the transport to the workers of equal local rank, one per host.
        everyone: the transport to all workers, for small tensors.
    """

    def __init__(self, peers: Peers, rank: int, split: Split, across: Transport, everyone: Transport) -> None:
        super().__init__(peers, rank, split)
        self._across, self._everyone = across, everyone
        self.tallies = across.tallies
        self.measured, self.traffic = across.measured, across.traffic
        everyone.traffic = across.traffic
        self._cover = self._host_cover()

    @property
    def topology(self) -> str:
        """Between hosts."""
        return self._across.topology

    def use_topology(self, name: str) -> None:
        """Between hosts."""
        self._across.use_topology(name)

    def go_direct(self, *, always: bool) -> None:
        """Between hosts."""
        self._across.go_direct(always=always)

    def measure_links(self) -> Links | None:
        """Between all workers, also those of one host."""
        return self._everyone.measure_links()

    @property
    def waits(self) -> bool:
        """Whether this worker waits for another worker, on any host."""
        return super().waits or self._across.waits or self._everyone.waits

    def resplit(self, split: Split) -> None:
        """Split the shards anew, on this host and between hosts."""
        super().resplit(split)
        self._across.resplit(host_split(split, len(self._peers.ranks) + 1))
        self._everyone.resplit(split)
        self._cover = self._host_cover()

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Rows in this host's shared memory."""
        parts = [replace(bucket, entries=(), numel=len(self.part(bucket.numel))) for bucket in buckets]
        self._across.allocate([part for part in parts if part.numel], 0)  # measured there on what will travel
        return super().allocate(buckets, rows)

    def reduce(
        self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None, tally: Tally = UNTALLIED
    ) -> Tensor:
        """Meet on this host, add its part, reduce that part between hosts, meet on this host."""
        gathered = self._memory.gather(bucket, partials)
        result = gathered.result
        mine = self.part(result.numel())
        if mine:
            part = slice(mine.start, mine.stop)
            own = {node: value[part] for node, value in gathered.partials.items()}
            for value in own.values():
                tally.read(value, mine.start)
            across = tally.part(mine.start)
            self._finish(bucket, own, result[part], divisor, across)
            tally.close(across)
            tally.keep(result[part], mine.start)
        self._memory.meet()
        self.traffic.count(*self._traffic_of(result, len(partials)))
        return result

    def _finish(
        self, bucket: Hashable, own: dict[Node, Tensor], result: Tensor, divisor: float | None, tally: Tally
    ) -> None:
        """Add this worker's part over its host, and reduce it between hosts."""
        sums = [self.tree.finish(own, lambda left, right: left.add_(right), node) for node in self._cover]
        for value in sums:
            tally.wrote(value, 0)
        result.copy_(self._across.reduce(bucket, sums or [result], divisor, tally))

    def all_gather(self, row: Tensor) -> Tensor:
        """Between all workers."""
        return self._everyone.all_gather(row)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Between all workers."""
        self._everyone.broadcast(tensor, source)

    def abort(self) -> None:
        """Hang up on all sides."""
        super().abort()
        self._across.abort()
        self._everyone.abort()

    def close(self) -> None:
        """Hang up on all sides."""
        super().close()
        self._across.close()
        self._everyone.close()

    def _host_cover(self) -> tuple[Node, ...]:
        here = self._across.split.of(self._across.rank)
        return self.tree.cover(here.start, here.stop)


def host_split(split: Split, workers: int) -> Split:
    """The shards of each host, if every host has so many workers.

    Raises:
        ValueError: the number does not divide the number of workers.
    """
    if split.workers % workers:
        raise ValueError(f"{split.workers} workers cannot be {workers} on every host")
    return Split(split.bounds[::workers])


RELAY = 4 * 2**20
"""Bytes that are handed over at a time: they are still in the cache when they are read."""


class SharedMemoryTransport(HostTransport):
    """Every worker writes its partial sums into memory that all share, and adds its part of the tree over all of them.

    Where some only serve, they add, and the others read what became of it.

    A reduction has two meetings, each a small message to every peer: when all partial sums are written, and when all
    parts of the result are. Nothing is copied through a socket, and nobody waits busily.
    """

    needs_core = True

    def __init__(self, peers: Peers, rank: int, split: Split) -> None:
        super().__init__(peers, rank, split)
        self._planned: dict[Hashable, tuple[list[_Sum], tuple[int, int]]] = {}

    def resplit(self, split: Split) -> None:
        """Forget the plans: their memory is let go of."""
        self._planned.clear()
        super().resplit(split)

    def reduce(
        self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None, tally: Tally = UNTALLIED
    ) -> Tensor:
        """Meet, add this worker's part of the tree over everybody's partial sums, meet."""
        gathered = self._memory.gather(bucket, partials)
        if gathered.place not in self._planned:
            traffic = self._traffic_of(gathered.result, len(partials))
            self._planned[gathered.place] = list(self._plan(gathered)), traffic
        sums, traffic = self._planned[gathered.place]
        for piece in sums:
            piece.carry_out(divisor, tally)
        self._memory.meet()
        self.traffic.count(*traffic)
        return gathered.result

    def summed(self, numel: int) -> range:
        """A server's share, where there are some."""
        servers = self.split.servers
        if not servers:
            return super().summed(numel)
        return part_of(numel, self.rank - servers.start, len(servers)) if self.rank in servers else range(0)

    def all_gather(self, row: Tensor) -> Tensor:
        """Small rows travel as messages, large ones through memory that is given back at once.

        Raises:
            JobMismatch: a small row has another size than this worker's; names the rank.
        """
        data = row.contiguous().view(-1).view(torch.uint8)
        if data.numel() == 0:
            return row.new_empty((self.world_size, 0))
        self.traffic.count(len(self._peers.ranks) * data.nbytes, len(self._peers.ranks))
        if data.numel() <= LARGEST_MESSAGE:
            messages = self._peers.exchange(data.numpy().tobytes())
            _require_bytes(messages, data.numel())
            joined = bytearray().join(map(messages.__getitem__, range(self.world_size)))
            rows = torch.frombuffer(joined, dtype=torch.uint8)
        else:
            rows = self._through_memory(data, range(self.world_size))
        return rows.view(row.dtype).reshape(self.world_size, row.numel())

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Piece by piece through memory that is given back at once, or as a message.

        Raises:
            JobMismatch: a message has another size than ``tensor``; names the rank.
        """
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.numel() == 0:
            return
        if self.rank == source:
            self.traffic.count(len(self._peers.ranks) * data.nbytes, len(self._peers.ranks))
        if data.numel() <= LARGEST_MESSAGE:
            message = data.numpy().tobytes() if self.rank == source else b""
            messages = self._peers.exchange(message)
            _require_bytes({source: messages[source]}, data.numel())
            received = torch.frombuffer(bytearray(messages[source]), dtype=torch.uint8)
            if self.rank != source:
                data.copy_(received)
        else:
            self._relay(data, source)
        if self.rank != source and data.data_ptr() != tensor.data_ptr():  # it does not lie row by row
            with torch.no_grad():
                tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    def close(self) -> None:
        """Hang up, and let go of the memory."""
        super().close()
        self._planned.clear()

    def _plan(self, gathered: Gathered) -> Iterator["_Sum"]:
        """The sums of this worker's part, piece by piece. They are the same in every step."""
        mine = self.summed(gathered.result.numel())
        for begin in mine[::PIECE]:
            piece = slice(begin, min(begin + PIECE, mine.stop))
            partials = {node: value[piece] for node, value in gathered.partials.items()}
            additions = _additions(self.tree, partials, gathered.result[piece])
            yield _Sum(begin, [*map(Words, partials.values())], additions, Words(additions[-1][-1]))

    def _relay(self, data: Tensor, source: int) -> None:
        """Relay data through a small segment: one half is read while the other is written, so few pages are new."""
        size = min(2 * RELAY, data.numel())
        sizes = [pages(size if rank == source else 0) for rank in range(self.world_size)]
        halves = share_segments(self._peers, sizes)[source].bytes[:size].split(RELAY)
        for number, piece in enumerate(data.split(RELAY)):
            half = halves[number % 2][: piece.numel()]
            if self.rank == source:
                half.copy_(piece)
            # A worker that comes to this meeting has read the piece before, whose half is written next.
            self._peers.exchange(b"")
            if self.rank != source:
                piece.copy_(half)

    def _through_memory(self, data: Tensor, sources: Sequence[int]) -> Tensor:
        sizes = [pages(data.numel() if rank in sources else 0) for rank in range(self.world_size)]
        segments = share_segments(self._peers, sizes)
        if self.rank in sources:
            segments[self.rank].bytes[: data.numel()].copy_(data)
        self._peers.exchange(b"")
        return torch.cat([segments[rank].bytes[: data.numel()] for rank in sources])


_Addition = tuple[Tensor, Tensor | None, Tensor]
"""The left and right summand, and the place of the sum; without a right summand, the left one is copied."""


class _Sum(NamedTuple):
    """A piece of a bucket: where it begins, everybody's partial sums of it, and what is done with them."""

    start: int
    partials: list[Words]
    additions: list[_Addition]
    result: Words

    def carry_out(self, divisor: float | None, tally: Tally) -> None:
        for partial in self.partials:
            tally.read(partial, self.start)
        for left, right, out in self.additions:
            if right is None:
                out.copy_(left)
            else:
                torch.add(left, right, out=out)
        if divisor is not None:
            self.result.values.div_(divisor)
        tally.finished.look(self.result.values)
        tally.keep(self.result, self.start)


def _additions(tree: SummationTree, partials: dict[Node, Tensor], result: Tensor) -> list[_Addition]:
    # Only this worker reads this part of anybody's partial sums, so inner nodes may be added in place.
    additions: list[_Addition] = []

    def add(left: Tensor, right: Tensor) -> Tensor:
        additions.append((left, right, left))
        return left

    if tree.root in partials:  # the others only serve
        return [(partials[tree.root], None, result)]
    left, right = (tree.finish(partials, add, half) for half in children(tree.root))
    return [*additions, (left, right, result)]


def _require_bytes(messages: Mapping[int, bytes], expected: int) -> None:
    """Refuse messages of other sizes: their workers are in another call than this one.

    Raises:
        JobMismatch: names the first such rank.
    """
    for rank, message in sorted(messages.items()):
        if len(message) != expected:
            raise JobMismatch(
                f"rank {rank} sent {len(message)} bytes where this worker expects {expected}: the two are in different "
                "calls. Every worker has to make the same calls in the same order (step.run, run.evaluate, "
                "run.predict, run.all_reduce, run.broadcast, run.barrier, run.checkpoint, run.finish): none "
                "inside of `if run.is_main`, and no loop that some workers leave earlier"
            )
