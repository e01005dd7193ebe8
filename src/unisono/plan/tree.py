"""The one order of additions: a fixed binary tree whose leaves are the shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A whole subtree: the shards ``start … stop-1``."""

    start: int
    stop: int


class Summand(NamedTuple):
    """Shards that a worker adds up one after the other, before anything else is added to them.

    Attributes:
        shards: the shards, neighbours of each other, in the order in which they come.
        siblings: the partial sums that are there already and with which they become one, from the smallest to the
            largest.
    """

    shards: tuple[int, ...]
    siblings: tuple[Node, ...]

    @property
    def node(self) -> Node:
        """What they are together, without siblings."""
        return Node(min(self.shards), max(self.shards) + 1)


@dataclass(frozen=True)
class SummationTree:
    """The binary tree over shards ``0 … shards-1`` along which everything is added.

    A node of n > 1 shards splits after the largest power of two below n. For eight shards this is the
    perfectly balanced tree; for any other number the left part is always perfect, so the tree depends on
    nothing but the number of shards.
    """

    shards: int

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError(f"a summation tree needs at least 1 shard, got {self.shards}")

    @cached_property
    def root(self) -> Node:
        """The node of all shards."""
        return Node(0, self.shards)

    def cover(self, start: int, stop: int) -> tuple[Node, ...]:
        """The fewest whole subtrees that make up the shards ``start … stop-1``, from left to right."""
        return _cover(self.root, start, stop)

    def finish(self, partials: Mapping[Node, T], add: Callable[[T, T], T], node: Node | None = None) -> T:
        """The value of a node, by default the root, from partial sums that together cover it.

        Args:
            partials: the value of each subtree of a cover.
            add: adds two siblings; may reuse its left argument.
            node: the node at which to stop.

        Raises:
            KeyError: a leaf of the tree is covered by no partial sum.
        """
        whole = node or self.root
        if whole in partials:
            return partials[whole]
        values = dict(partials)
        for left, right, both in _additions(whole, frozenset(values)):
            values[both] = add(values[left], values[right])
        return values[whole]

    def most_kept(self, shards: Sequence[int]) -> int:
        """The largest number of partial sums that a worker with these shards keeps at a time, in their order."""
        return most_kept(self.summands(shards))

    def summands(self, shards: Sequence[int]) -> list["Summand"]:
        """The shards of a worker one by one, in the order in which they come."""
        return [Summand((shard,), merged) for shard, merged in zip(shards, self.merges(shards), strict=True)]

    def longest_summands(self, shards: Sequence[int]) -> list["Summand"]:
        """The same, but shards together of which each is added onto the sum of those just before it."""
        summands: list[Summand] = []
        for summand in self.summands(shards):
            if summands and not summands[-1].siblings and summand.siblings[:1] == (summands[-1].node,):
                summands.append(Summand((*summands.pop().shards, *summand.shards), summand.siblings[1:]))
            else:
                summands.append(summand)
        return summands

    def merges(self, shards: Sequence[int]) -> tuple[tuple[Node, ...], ...]:
        """How a worker adds up shards as they arrive, one after the other, in whatever order.

        Returns:
            for each shard, the partial sums that are there already and with which it becomes one, from the smallest to
            the largest. What is left in the end of neighbouring shards is their cover.
        """
        return _merges(self.shards, tuple(shards))


def total(values: Sequence[float]) -> float:
    """The sum of a number for each shard, along the summation tree."""
    sums = list(values)
    for left, right in _pairs(len(sums)):
        sums[left] += sums[right]
    return sums[0]


@cache
def _pairs(shards: int) -> tuple[tuple[int, int], ...]:
    """The first shards of the two halves of every node, siblings before what they become."""
    leaves = frozenset(Node(shard, shard + 1) for shard in range(shards))
    return tuple((left.start, right.start) for left, right, _ in _additions(Node(0, shards), leaves))


def most_kept(summands: Sequence[Summand]) -> int:
    """The largest number of partial sums that are kept at a time."""
    kept = most = 0
    for summand in summands:
        kept += 1 - len(summand.siblings)
        most = max(most, kept)
    return most


def children(node: Node) -> tuple[Node, Node]:
    """The left and the right half of a node of at least two shards."""
    size = node.stop - node.start
    middle = node.start + (1 << ((size - 1).bit_length() - 1))
    return Node(node.start, middle), Node(middle, node.stop)


@lru_cache(maxsize=2**12)
def _cover(node: Node, start: int, stop: int) -> tuple[Node, ...]:
    if stop <= node.start or node.stop <= start:
        return ()
    if start <= node.start and node.stop <= stop:
        return (node,)
    left, right = children(node)
    return _cover(left, start, stop) + _cover(right, start, stop)


@lru_cache(maxsize=2**8)
def _additions(node: Node, known: frozenset[Node]) -> tuple[tuple[Node, Node, Node], ...]:
    """What is added to make a node of those that are known, one after the other: left, right, and both together."""
    if node in known:
        return ()
    if node.stop - node.start == 1:
        raise KeyError(f"no partial sum covers shard {node.start}")
    left, right = children(node)
    return (*_additions(left, known), *_additions(right, known), (left, right, node))


@cache
def _siblings(shards: int) -> Mapping[Node, tuple[Node, Node]]:
    """Of each node but the root, its sibling and what both are together."""
    siblings: dict[Node, tuple[Node, Node]] = {}
    pending = [Node(0, shards)]
    while pending:
        node = pending.pop()
        if node.stop - node.start > 1:
            left, right = children(node)
            siblings |= {left: (right, node), right: (left, node)}
            pending += (left, right)
    return siblings


@cache
def _merges(shards: int, order: tuple[int, ...]) -> tuple[tuple[Node, ...], ...]:
    siblings = _siblings(shards)
    held: set[Node] = set()
    merges = []
    for shard in order:
        node, merged = Node(shard, shard + 1), list[Node]()
        while node in siblings and siblings[node][0] in held:
            sibling, node = siblings[node]
            held.remove(sibling)
            merged.append(sibling)
        held.add(node)
        merges.append(tuple(merged))
    return tuple(merges)
