"""The transport between workers of one host: partial sums are added where they lie, in shared memory."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import JobMismatch
from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree, children
from unisono.reduce.host_memory import Gathered, pages, part_of, share_segments
from unisono.reduce.host_transport import HostTransport
from unisono.reduce.peers import LARGEST_MESSAGE, Peers
from unisono.reduce.tally import Tally
from unisono.reduce.transport import PIECE

RELAY = 4 * 2**20
"""Bytes that are handed over at a time: they are still in the cache when they are read."""


class SharedMemoryTransport(HostTransport):
    """Every worker writes its partial sums into memory that all share, and adds its part of the tree over all of them.

    Where some only serve, they add, and the others read what became of it.

    A reduction has two meetings, each a small message to every peer: when all partial sums are written, and when all
    parts of the result are. Nothing is copied through a socket, and nobody waits busily.

    Args:
        peers: the other workers, all on this host.
        rank: this worker's rank.
        split: the shards of each worker.
    """

    needs_core = True

    def __init__(self, peers: Peers, rank: int, split: Split) -> None:
        super().__init__(peers, rank, split)
        self._sums: dict[tuple[int, int, bytes], list[_Sum]] = {}

    def resplit(self, split: Split) -> None:
        """What was planned lies in memory that is let go of."""
        self._sums.clear()
        super().resplit(split)

    def reduce(
        self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None, tally: Tally | None = None
    ) -> Tensor:
        """Meet, add this worker's part of the tree over everybody's partial sums, meet."""
        gathered = self._memory.gather(bucket, partials)
        if gathered.place not in self._sums:
            self._sums[gathered.place] = list(self._plan(gathered))
        for each in self._sums[gathered.place]:
            each.carry_out(divisor, tally)
        self._memory.meet()
        self._count_reduction(gathered.result, len(partials) if self.computes else 0)
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
        self._count_copies(data)
        if data.numel() <= LARGEST_MESSAGE:
            told = self._peers.exchange(data.numpy().tobytes())
            _require_bytes(told, data.numel())
            joined = bytearray().join(told[rank] for rank in range(self.world_size))
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
            self._count_copies(data)
        if data.numel() <= LARGEST_MESSAGE:
            message = data.numpy().tobytes() if self.rank == source else b""
            told = self._peers.exchange(message)
            _require_bytes({source: told[source]}, data.numel())
            received = torch.frombuffer(bytearray(told[source]), dtype=torch.uint8)
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
        self._sums.clear()

    def _plan(self, gathered: Gathered) -> Iterator["_Sum"]:
        """The sums of this worker's part, piece by piece. They are the same in every step."""
        mine = self.summed(gathered.result.numel())
        for begin in mine[::PIECE]:
            piece = slice(begin, min(begin + PIECE, mine.stop))
            partials = {node: value[piece] for node, value in gathered.partials.items()}
            additions = _additions(self.tree, partials, gathered.result[piece])
            yield _Sum(begin, tuple(partials.values()), additions)

    def _relay(self, data: Tensor, source: int) -> None:
        """One half of a small segment is read while the other is written: no page of it is new for long."""
        size = min(2 * RELAY, data.numel())
        sizes = [pages(size if rank == source else 0) for rank in range(self.world_size)]
        halves = share_segments(self._peers, sizes)[source].bytes[:size].split(RELAY)
        for number, piece in enumerate(data.split(RELAY)):
            half = halves[number % 2][: piece.numel()]
            if self.rank == source:
                half.copy_(piece)
            # Whoever comes to this meeting has read the piece before, whose half is written next.
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


class _Sum(NamedTuple):
    """A piece of a bucket: where it begins, everybody's partial sums of it, and what is done with them."""

    start: int
    partials: tuple[Tensor, ...]
    additions: list["_Addition"]

    def carry_out(self, divisor: float | None, tally: Tally | None) -> None:
        """Add, divide."""
        for partial in self.partials if tally is not None else ():
            assert tally is not None
            tally.read(partial, self.start)
        for addition in self.additions:
            addition.carry_out()
        result = self.additions[-1].out
        if divisor is not None:
            result.div_(divisor)
        if tally is not None:
            tally.finished.look(result)
            tally.keep(result, self.start)


class _Addition(NamedTuple):
    left: Tensor
    right: Tensor | None  # where there is nothing to add, it is copied
    out: Tensor

    def carry_out(self) -> None:
        if self.right is None:
            self.out.copy_(self.left)
        else:
            torch.add(self.left, self.right, out=self.out)


def _additions(tree: SummationTree, partials: dict[Node, Tensor], result: Tensor) -> list[_Addition]:
    # Only this worker reads this part of anybody's partial sums, so inner nodes may be added in place.
    found: list[_Addition] = []

    def add(left: Tensor, right: Tensor) -> Tensor:
        found.append(_Addition(left, right, left))
        return left

    if tree.root in partials:  # the others only serve
        return [_Addition(partials[tree.root], None, result)]
    left, right = (tree.finish(partials, add, half) for half in children(tree.root))
    return [*found, _Addition(left, right, result)]


def _require_bytes(told: Mapping[int, bytes], expected: int) -> None:
    """Refuse messages of other sizes: their workers are in another call than this one.

    Raises:
        JobMismatch: names the first such rank.
    """
    for rank, message in sorted(told.items()):
        if len(message) != expected:
            raise JobMismatch(
                f"rank {rank} sent {len(message)} bytes where this worker expects {expected}: the two are in different "
                "calls. Every worker has to make the same calls in the same order (step.run, run.evaluate, "
                "run.predict, run.all_reduce, run.broadcast, run.barrier, run.checkpoint, run.finish): none "
                "inside of `if run.is_main`, and no loop that some workers leave earlier"
            )
