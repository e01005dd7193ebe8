"""The reduction of one bucket over a process group, the messages between workers, and by which topology."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from unisono.plan.split import Split, even_bounds
from unisono.plan.topology import Sum, Transfer, finishers, plan
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.buckets import ALIGNMENT, Bucket
from unisono.reduce.partial_sums import UNTALLIED, Tally

PIECE = 2**19
"""Bytes that a piece has at least, where the number of pieces is free."""

MOST_PIECES = 4
"""The most pieces for each worker that finishes some, where the number of pieces is free."""

PieceNode = tuple[int, Node]
"""The key of a partial sum: the piece of the bucket, and the node of the summation tree."""


class Messages:
    """Reduces buckets of one length and dtype, by any topology, by sends and receives between two workers at a time.

    All receives are posted before anything is sent: what comes early finds its place, and goes there without a copy.

    Args:
        group: a ``ProcessGroupGloo``.
        like: a tensor of the length, dtype and device of the buckets.
        topology: one of :data:`unisono.plan.topology.TOPOLOGIES`.

    Attributes:
        sent_bytes: the bytes that this worker sends for each bucket.
        sent_messages: the number of messages that this worker sends for each bucket.
    """

    def __init__(self, group: Any, like: Tensor, rank: int, split: Split, topology: str) -> None:
        self._group = group
        self._workers = split.workers
        tree, mine = SummationTree(split.shards), split.of(rank)
        self._root = tree.root
        self._cover = tree.cover(mine.start, mine.stop)
        pieces = pieces_of(like, split, topology)
        bounds = [unit * ALIGNMENT for unit in even_bounds(like.numel() // ALIGNMENT, pieces)]
        self._parts = [slice(start, stop) for start, stop in pairwise(bounds)]
        graph = plan(split, topology, pieces)
        self._turns = graph.turns(rank)
        numbers = count()
        self._tags = {message: [next(numbers) for _ in message.nodes] for message in graph.messages}
        self._total = like.new_empty(like.numel())
        self._buffers: dict[PieceNode, Tensor] = {}
        for message in (turn.received for turn in self._turns if turn.received):
            for node in message.nodes:
                self._buffers[message.piece, node] = torch.empty_like(self._total[self._parts[message.piece]])
        self._buffers |= {(piece, self._root): self._total[part] for piece, part in enumerate(self._parts)}
        sent = [message for turn in self._turns for message in turn.sends for _ in message.nodes]
        self.sent_messages = len(sent)
        self.sent_bytes = sum(self._total[self._parts[message.piece]].nbytes for message in sent)

    def reduce(self, partials: Sequence[Tensor], divisor: float | None, tally: Tally = UNTALLIED) -> Tensor:
        """Take this worker's turns, one after the other; see :meth:`Transport.reduce`.

        Raises:
            RuntimeError: the backend's, when another worker is gone or gives no sign.
        """
        arriving = [self._receive(turn.received) if turn.received else [] for turn in self._turns]
        leaving: list[Any] = []
        values = dict(self._buffers)
        if self._cover == (self._root,):  # the only worker that computes: nobody adds anything
            self._divide(partials[0], divisor, tally)
        for piece, part in enumerate(self._parts):
            values |= {(piece, node): partial[part] for node, partial in zip(self._cover, partials, strict=False)}
        for turn, works in zip(self._turns, arriving, strict=True):
            for work in works:
                work.wait()
            for siblings in turn.sums:
                self._add(siblings, values, divisor, tally)
            for message in turn.sends:
                leaving += self._send(message, values)
        for work in leaving:
            work.wait()
        for part in self._parts:
            tally.receive(self._total[part], part.start)
        return self._total

    def _divide(self, total: Tensor, divisor: float | None, tally: Tally) -> None:
        tally.read(total, 0)
        if divisor is not None:
            total.div_(divisor)
        for part in self._parts:
            tally.finished.look(total[part])
            tally.wrote(total[part], part.start, self._workers)

    def _receive(self, message: Transfer) -> list[Any]:
        tagged = zip(message.nodes, self._tags[message], strict=True)
        return [self._group.recv([self._buffers[message.piece, node]], message.sender, tag) for node, tag in tagged]

    def _send(self, message: Transfer, values: Mapping[PieceNode, Tensor]) -> list[Any]:
        tagged = zip(message.nodes, self._tags[message], strict=True)
        return [self._group.send([values[message.piece, node]], message.receiver, tag) for node, tag in tagged]

    def _add(self, siblings: Sum, values: dict[PieceNode, Tensor], divisor: float | None, tally: Tally) -> None:
        piece, node = siblings.piece, siblings.node
        left, right = values[piece, siblings.left], values[piece, siblings.right]
        start = self._parts[piece].start
        tally.read(left, start)
        tally.read(right, start)
        if node != self._root:
            values[piece, node] = left.add_(right)  # what was sent before is held no more, so nobody reads this
        else:
            torch.add(left, right, out=values[piece, node])
            if divisor is not None:
                values[piece, node].div_(divisor)
            tally.finished.look(values[piece, node])
        tally.wrote(values[piece, node], start, self._workers if node == self._root else 0)


class Collectives:
    """Reduces buckets by the topology ``direct``, by the standard collectives that all backends have.

    An all-to-all of the partial sums, and an all-gather of the finished pieces; where only some workers finish pieces,
    a broadcast from each of them. It copies more than :class:`Messages`.

    Args:
        like: a tensor of the length, dtype and device of the buckets.
    """

    def __init__(self, group: Any, like: Tensor, rank: int, split: Split) -> None:
        self._group, self._rank = group, rank
        self._tree = SummationTree(split.shards)
        covers = [self._tree.cover(split.of(peer).start, split.of(peer).stop) for peer in range(split.workers)]
        self._servers = split.servers
        first, parts = (self._servers.start, len(self._servers)) if self._servers else (0, split.workers)
        length = -(-like.numel() // (ALIGNMENT * parts)) * ALIGNMENT
        self._starts = [min(max(peer - first, 0) * length, like.numel()) for peer in range(split.workers + 1)]
        sizes = [stop - start for start, stop in pairwise(self._starts)]
        mine, own = sizes[rank], len(covers[rank])
        self._nodes = [node for cover in covers for node in cover]
        self._packed = like.new_empty(own * like.numel() if own > 1 else 0)
        self._send_sizes = [own * size for size in sizes]
        self._receive_sizes = [len(cover) * mine for cover in covers]
        self._received = like.new_empty(len(self._nodes) * mine)
        self._part = like.new_zeros(length)
        self._gathered = like.new_empty(parts * length)
        self._total = self._gathered[: like.numel()]
        self._shares = [self._total[start:stop] for start, stop in pairwise(self._starts)]
        others, handed_out = split.workers - 1, mine if self._servers else length
        self.sent_messages = sum(size > 0 for size in self._send_sizes) - (self._send_sizes[rank] > 0)
        self.sent_messages += others if handed_out else 0
        self.sent_bytes = (sum(self._send_sizes) - self._send_sizes[rank] + others * handed_out) * like.itemsize

    def reduce(self, partials: Sequence[Tensor], divisor: float | None, tally: Tally = UNTALLIED) -> Tensor:
        """All-to-all, finish the tree on this worker's piece, all-gather or broadcast."""
        packed = self._pack(partials)
        self._group.alltoall_base(self._received, packed, self._receive_sizes, self._send_sizes).wait()
        parts = self._received.view(len(self._nodes), -1)
        start = self._starts[self._rank]
        for partial in parts:
            tally.read(partial, start)
        part = self._tree.finish(dict(zip(self._nodes, parts, strict=True)), lambda left, right: left.add_(right))
        if divisor is not None:
            part.div_(divisor)
        tally.finished.look(part)
        tally.wrote(part, start, len(self._shares))
        if self._servers:
            self._hand_out(part)
        else:
            self._part[: part.numel()].copy_(part)
            self._group._allgather_base(self._gathered, self._part).wait()
        for share, first in zip(self._shares, self._starts, strict=False):
            tally.receive(share, first)
        return self._total

    def _hand_out(self, part: Tensor) -> None:
        if self._rank in self._servers:
            self._shares[self._rank].copy_(part)
        for server in self._servers:
            if self._shares[server].numel():
                self._group.broadcast(self._shares[server], server).wait()

    def _pack(self, partials: Sequence[Tensor]) -> Tensor:
        """The partial sums in the order in which they are sent: by receiver, then from left to right."""
        if self._rank in self._servers:
            return self._packed
        if len(partials) == 1:
            return partials[0]
        pieces = [partial[start:stop] for start, stop in pairwise(self._starts) for partial in partials]
        return torch.cat(pieces, out=self._packed)


Exchange = Messages | Collectives


def pieces_of(like: Tensor, split: Split, topology: str) -> int:
    """Into how many pieces a bucket is cut."""
    abreast = finishers(split, topology)
    in_turn = 1
    if abreast < split.workers:  # while one piece comes back, the next is on its way there
        in_turn = max(1, min(like.nbytes // abreast // PIECE, MOST_PIECES))
    return max(1, min(abreast * in_turn, like.numel() // ALIGNMENT))


# Which topology carries buckets of which size: by what was measured between these workers.

REPETITIONS = 5
"""At most so many for each topology; the shortest counts."""

ENOUGH_S = 0.2
"""Seconds after which a topology is not repeated."""

Timing = Callable[[], float]
"""Reduces a bucket once; returns the seconds of the slowest worker, the same number on every worker."""


class Choice:
    """Takes the fastest topology for each class of sizes; a class is a power of two of bytes.

    Every worker gets the same numbers from its trials, and so decides alike.

    Args:
        names: the topologies to choose from. The first is taken as long as nothing is measured.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._seconds: dict[int, dict[str, float]] = {}

    def topology(self, size: int) -> str:
        """Return the topology for a bucket of ``size`` bytes: the fastest in measurements of about that size."""
        if not self._seconds:
            return self._names[0]
        seconds = self._seconds[min(self._seconds, key=lambda known: abs(known - size.bit_length()))]
        return min(seconds, key=lambda name: seconds[name])

    def open(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """The largest bucket of each class about which nothing is known yet, from small to large."""
        largest: dict[int, Bucket] = {}
        for bucket in sorted(buckets, key=_size):
            largest[_size(bucket).bit_length()] = bucket
        unknown = [bucket for known, bucket in largest.items() if known not in self._seconds]
        return unknown if len(self._names) > 1 else []

    def measure(self, bucket: Bucket, trial: Callable[[str], Timing]) -> dict[str, float]:
        """Try every topology on buckets of this one's class. Return the seconds of each."""
        seconds: dict[str, float] = {}
        for name in self._names:
            once, best, spent = trial(name), inf, 0.0
            for _ in range(REPETITIONS):
                if spent < ENOUGH_S:
                    last = once()
                    best, spent = min(best, last), spent + last
            seconds[name] = best
        self._seconds[_size(bucket).bit_length()] = seconds
        return seconds


def _size(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize
