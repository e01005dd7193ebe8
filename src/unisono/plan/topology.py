"""The ways of partial sums between workers, as data: a graph of sends and sums; and how fast the connections are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree


class Transfer(NamedTuple):
    """The partial sums that one worker sends to another at once.

    A partial sum moves: its sender has no further use for it. Only the root is copied.
    """

    piece: int  # of the bucket, which is cut into several
    sender: int
    receiver: int
    nodes: tuple[Node, ...]  # from left to right


class Sum(NamedTuple):
    """Two siblings, which the worker that holds both adds: left + right."""

    piece: int
    left: Node
    right: Node

    @property
    def node(self) -> Node:
        """What the two make up."""
        return Node(self.left.start, self.right.stop)


class Turn(NamedTuple):
    """One turn of a worker: wait for a message, add what it now can, send what it now may.

    A worker's first turn waits for nothing.
    """

    received: Transfer | None
    sums: tuple[Sum, ...]
    sends: tuple[Transfer, ...]


Parents = tuple[int, ...]
"""A tree of workers: for each rank the one that gets its partial sums. The root is its own parent."""


def _direct(workers: int, piece: int) -> Parents:
    return (piece % workers,) * workers


def _ring(workers: int, piece: int) -> Parents:
    root = piece % workers
    return tuple(rank if rank == root else (rank + 1) % workers for rank in range(workers))


def _tree(workers: int, piece: int) -> Parents:
    # Workers meet in pairs, as shards do in the summation tree, and the left one goes on: 7 to 6, 6 to 4, 4 to 0.
    return tuple(rank & (rank - 1) for rank in range(workers))


def _star(workers: int, piece: int) -> Parents:
    return (0,) * workers


def _served(split: Split, piece: int) -> Parents:
    return (split.servers[piece % len(split.servers)],) * split.workers


_PARENTS: dict[str, Callable[[int, int], Parents]] = {"direct": _direct, "ring": _ring, "tree": _tree, "star": _star}

TOPOLOGIES = tuple(_PARENTS)
"""``direct``: every worker finishes its own pieces, and all others send to it. ``ring``: the same, from neighbour to
neighbour. ``tree``: workers meet in pairs, up to rank 0. ``star``: all send to rank 0."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The messages between workers by which the pieces of a bucket are reduced, in their order.

    For each piece the workers form a tree. Partial sums go up in it, and whoever holds two siblings of the summation
    tree adds them; nobody adds anything else. The root goes down the same tree.

    Attributes:
        pieces: into how many a bucket is cut.
        rounds: a message can be sent when those of the rounds before have arrived.
    """

    split: Split
    pieces: int
    rounds: tuple[tuple[Transfer, ...], ...]

    @property
    def messages(self) -> Iterator[Transfer]:
        """All messages, round by round."""
        return chain.from_iterable(self.rounds)

    def turns(self, rank: int) -> tuple[Turn, ...]:
        """What one worker does, one after the other; all workers together never wait in a circle."""
        tree = SummationTree(self.split.shards)
        held = dict.fromkeys(range(self.pieces), _cover(self.split, rank))
        first = _Turn(None)
        turns, latest = [first], dict.fromkeys(range(self.pieces), first)
        for message in self.messages:
            piece = message.piece
            if message.sender == rank:
                latest[piece].sends.append(message)
            if message.receiver == rank:
                turn = latest[piece] = _Turn(message)
                turns.append(turn)
                if message.nodes != (tree.root,):
                    held[piece], sums = _added(tree, (*held[piece], *message.nodes))
                    turn.sums = [Sum(piece, left, right) for left, right in sums]
        return tuple(Turn(turn.received, tuple(turn.sums), tuple(turn.sends)) for turn in turns)


class _Turn:
    """A turn in the making."""

    def __init__(self, received: Transfer | None) -> None:
        self.received = received
        self.sums: list[Sum] = []
        self.sends: list[Transfer] = []


@cache
def plan(split: Split, topology: str, pieces: int) -> Plan:
    """The graph of sends for buckets that are cut into so many pieces.

    Args:
        split: the shards of each worker. Where some only serve, they finish the pieces, and all others send to
            them.
        topology: one of :data:`TOPOLOGIES`, for workers that all compute.
        pieces: any number. They follow each other on the same way; where workers distribute them, in turn.
    """
    abreast = finishers(split, topology)
    rounds: dict[int, list[Transfer]] = {}
    for piece in range(pieces):
        parents = _served(split, piece) if split.servers else _PARENTS[topology](split.workers, piece)
        for number, message in _messages(split, parents, piece):
            rounds.setdefault(piece // abreast + number, []).append(message)
    return Plan(split, pieces, tuple(tuple(rounds[number]) for number in sorted(rounds)))


def finishers(split: Split, topology: str) -> int:
    """How many workers finish pieces of their own, so that there should be as many pieces, or several times as many."""
    if split.servers:
        return len(split.servers)
    return split.workers if topology in ("direct", "ring") else 1


def distinct(workers: int) -> tuple[str, ...]:
    """The topologies that are different graphs between so many workers, the first of those that are the same.

    Between two workers, the ring is direct and the tree is a star; between three, the tree still is.
    """
    graphs: dict[tuple[Parents, ...], str] = {}
    for name, parents in _PARENTS.items():
        graphs.setdefault(tuple(parents(workers, piece) for piece in range(workers)), name)
    return tuple(graphs.values())


def _messages(split: Split, parents: Parents, piece: int) -> Iterator[tuple[int, Transfer]]:
    """The messages of one piece, each with its round."""
    tree, ranks = SummationTree(split.shards), range(split.workers)
    held = [_cover(split, rank) for rank in ranks]
    depths = [_depth(parents, rank) for rank in ranks]
    heights = _heights(parents, depths)
    for rank in sorted(ranks, key=lambda rank: heights[rank])[:-1]:
        if held[rank]:  # a server has nothing of its own
            nodes, _ = _added(tree, held[rank])
            yield heights[rank], Transfer(piece, rank, parents[rank], nodes)
            held[parents[rank]] += nodes
    # Of those that one worker sends to, the one with the longest way below itself comes first.
    for rank in sorted(ranks, key=lambda rank: (depths[rank], -heights[rank]))[1:]:
        yield max(heights) + depths[rank] - 1, Transfer(piece, parents[rank], rank, (tree.root,))


def _cover(split: Split, rank: int) -> tuple[Node, ...]:
    mine = split.of(rank)
    return SummationTree(split.shards).cover(mine.start, mine.stop)


def _depth(parents: Parents, rank: int) -> int:
    """How many workers stand above this one."""
    return 0 if parents[rank] == rank else 1 + _depth(parents, parents[rank])


def _heights(parents: Parents, depths: list[int]) -> list[int]:
    """How long the longest way below each worker is."""
    heights = [0] * len(parents)
    for rank in sorted(range(len(parents)), key=lambda rank: -depths[rank])[:-1]:
        heights[parents[rank]] = max(heights[parents[rank]], heights[rank] + 1)
    return heights


def _added(tree: SummationTree, held: Collection[Node]) -> tuple[tuple[Node, ...], list[tuple[Node, Node]]]:
    """What is left of some nodes when all siblings among them are added, and these pairs in their order."""
    pairs: list[tuple[Node, Node]] = []

    def add(left: Node, right: Node) -> Node:
        pairs.append((left, right))
        return Node(left.start, right.stop)

    values = {node: node for node in held}
    covers = [tree.cover(start, stop) for start, stop in _runs(sorted(held))]
    return tuple(tree.finish(values, add, node) for cover in covers for node in cover), pairs


def _runs(nodes: list[Node]) -> Iterator[tuple[int, int]]:
    """The ranges of shards without a gap that these nodes make up."""
    gaps = (number for number, (left, right) in enumerate(pairwise(nodes), 1) if left.stop != right.start)
    for first, behind in pairwise([0, *gaps, len(nodes)]):
        yield nodes[first].start, nodes[behind - 1].stop


# The speed of the connections between workers.


@dataclass(frozen=True, slots=True)
class Links:
    """The measured latency and bandwidth between each two workers.

    Attributes:
        latency_s: the seconds of a small message between workers a and b as ``latency_s[a][b]``; 0 where a is b.
        bytes_per_s: the bandwidth between workers a and b, as ``bytes_per_s[a][b]``; 0 where a is b.
    """

    latency_s: tuple[tuple[float, ...], ...]
    bytes_per_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        workers = len(self.latency_s)
        if any([len(row) for row in table] != [workers] * workers for table in (self.latency_s, self.bytes_per_s)):
            raise ValueError("both tables need a row and a column for each worker")

    @classmethod
    def of(cls, pairs: Mapping[tuple[int, int], tuple[float, float]], workers: int) -> Links:
        """From latency and bandwidth of each pair, by the smaller and the larger rank."""

        def table(part: int) -> tuple[tuple[float, ...], ...]:
            return tuple(
                tuple(0.0 if a == b else pairs[min(a, b), max(a, b)][part] for b in range(workers))
                for a in range(workers)
            )

        return cls(table(0), table(1))

    @classmethod
    def from_json(cls, value: Mapping[str, Sequence[Sequence[float]]]) -> Links:
        """The inverse of ``asdict``."""
        return cls(*(tuple(map(tuple, value[name])) for name in ("latency_s", "bytes_per_s")))

    @property
    def slowest(self) -> tuple[int, int]:
        """The pair with the least bandwidth; the first of them."""
        workers = range(len(self.bytes_per_s))
        pairs = [(a, b) for a in workers for b in workers if a < b]
        return min(pairs, key=lambda pair: self.bytes_per_s[pair[0]][pair[1]])

    def figures(self) -> dict[str, Any]:
        """For the journal and ``metrics.jsonl``."""
        return {name: [list(row) for row in getattr(self, name)] for name in ("latency_s", "bytes_per_s")}
