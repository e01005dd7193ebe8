"""The partial sums that one worker keeps while it computes its shards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from unisono.plan.tree import Node, Summand
from unisono.reduce.buckets import ALIGNMENT, Bucket, BucketEntry
from unisono.reduce.tally import Tally
from unisono.words import Words

PIECE = 2**17
"""Elements that are added and tallied at a time, so that they are read again while they are in the cache."""


@dataclass(frozen=True, slots=True)
class PartialSumRow:
    """One partial sum of a bucket: a flat buffer, and each tensor's view of it.

    Attributes:
        flat: the buffer.
        views: one per tensor, in the order of the bucket's entries.
        pieces: the memory of each tensor with its padding, in the same order.
        values: the memory of all of them.
    """

    flat: Tensor
    views: tuple[Tensor, ...]
    pieces: tuple[tuple["Piece", ...], ...]
    values: Tensor | Words

    @classmethod
    def of(cls, bucket: Bucket, flat: Tensor) -> "PartialSumRow":
        """A row in this buffer."""
        pieces = tuple(_pieces(entry, flat) for entry in bucket.entries)
        return cls(flat, tuple(bucket.views(flat)), pieces, _summable(flat))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor's memory in a row.

    Attributes:
        start: the offset in the bucket, in elements.
        values: the memory with padding, a multiple of 64 elements; on the CPU as words, to be summed in every step.
        used: the memory without padding.
    """

    start: int
    values: Tensor | Words
    used: Tensor


def _pieces(entry: BucketEntry, flat: Tensor) -> tuple[Piece, ...]:
    numel = math.prod(entry.shape)
    stop = entry.offset + max(1, -(-numel // ALIGNMENT)) * ALIGNMENT
    return tuple(
        Piece(start, _summable(values), flat[start : min(start + PIECE, entry.offset + numel)])
        for start in range(entry.offset, stop, PIECE)
        for values in (flat[start : min(start + PIECE, stop)],)
    )


def _summable(values: Tensor) -> Tensor | Words:
    return Words(values) if values.device.type == "cpu" else values


def views_of(buckets: Sequence[Bucket], flats: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Every tensor's view of the buckets' buffers, in the order of the tensors' list."""
    placed = {
        entry.index: entry.view(flat) for bucket, flat in zip(buckets, flats, strict=True) for entry in bucket.entries
    }
    return tuple(placed[index] for index in range(len(placed)))


class PartialSums:
    """Adds up the shards' parts of a bucket along the summation tree, tensor by tensor as they arrive.

    The first leaf of a subtree is written into a row, its sibling is added onto it, and siblings among the rows become
    one, all while the tensor is still in the cache. Rows are allocated once and used again in every step: for a power
    of two of shards (up to 512) at most log2(shards)+1 of them.

    Args:
        summands: what this worker adds, one after the other: a shard, or the sum of several.
        rows: the rows: as many as ``most_kept`` of these summands; one without shards, which tells what the buckets are
            like.
    """

    def __init__(self, summands: Sequence[Summand], rows: Sequence[PartialSumRow]) -> None:
        self._summands = summands
        self._free = list(rows)
        self._held: dict[Node, PartialSumRow] = {}
        self._open: Sequence[PartialSumRow] = ()
        self._node: Node | None = None  # what the open shard makes whole
        self._coming: list[Summand] = []
        self._adds = False

    def begin(self) -> None:
        """Start over; this worker's summands follow, in their order."""
        self._free.extend(self._held.values())
        self._free.extend(self._open)
        self._held, self._open = {}, ()
        self._coming = list(reversed(self._summands))

    def open(self) -> None:
        """The next summand begins: every one of its tensors is put once, in any order."""
        summand = self._coming.pop()
        self._adds = bool(summand.siblings)
        self._open = [self._held.pop(node) for node in summand.siblings] or [self._free.pop()]
        together = (summand.node, *summand.siblings)
        self._node = Node(min(node.start for node in together), max(node.stop for node in together))

    def put(self, number: int, tensor: Tensor | None, tally: Tally | None = None) -> None:
        """Take one tensor of the shard, and add the siblings that this makes whole.

        An absent one counts as -0.0, the identity of float addition.

        Args:
            number: the tensor's number among the bucket's entries.
            tensor: a tensor of the row's dtype, or of a wider one, which is rounded; None for an absent gradient.
            tally: the tally of the bucket, if its memory is checked.
        """
        views = [row.views[number] for row in self._open]
        if tally is None or tally.is_empty:
            _put(views, tensor, adds=self._adds)
            return
        pieces = list(zip(*(row.pieces[number] for row in self._open), strict=True))
        sources = _cut_alike(tensor, views[0], len(pieces))
        if sources is None:
            _put_tallied(pieces, views, tensor, tally, adds=self._adds)
            return
        for rows, source in zip(pieces, sources, strict=True):
            _put_tallied([rows], [row.used for row in rows], source, tally, adds=self._adds)

    def put_all(self, tensors: Sequence[Tensor | None], tally: Tally | None = None) -> None:
        """Take all tensors of the shard at once, which are there already: see :meth:`put`.

        A call for each of them would take longer than small ones take to be added.

        Args:
            tensors: the tensors, in the order of the bucket's entries.
            tally: the tally of the bucket, if its memory is checked.
        """
        first = self._open[0]
        tally = None if tally is None or tally.is_empty else tally
        for row in self._open if self._adds and tally is not None else ():
            assert tally is not None
            tally.read(row.values, 0)
        views = [view for view, tensor in zip(first.views, tensors, strict=True) if tensor is not None]
        present = [tensor for tensor in tensors if tensor is not None]
        if self._adds and views:
            torch._foreach_add_(views, [each.to(first.flat.dtype) for each in present])
        elif views:
            torch._foreach_copy_(views, present)
        for view, tensor in zip(first.views, tensors, strict=True):
            if tensor is None:
                _put([view], None, adds=self._adds)
        for part, whole in pairwise(self._open):
            whole.flat.add_(part.flat)
        if tally is not None:
            tally.wrote(self._open[-1].values, 0)

    def close(self) -> None:
        """The shard is done: all its tensors were put."""
        *merged, whole = self._open
        assert self._node is not None, "a shard is open"
        self._free.extend(merged)
        self._held[self._node] = whole
        self._open, self._node = (), None

    def partials(self) -> list[Tensor]:
        """What the last shard leaves: the sums of the whole subtrees in this worker's range.

        All of its tensors were put.

        Returns:
            flat buffers, from left to right; one that holds nothing where there are no shards.
        """
        return [row.flat for row in self._left()]

    @property
    def rows(self) -> tuple[PartialSumRow, ...]:
        """The rows that :meth:`partials` are part of."""
        return tuple(self._left())

    def _left(self) -> list[PartialSumRow]:
        if not self._summands:
            return self._free
        assert not self._coming, f"{len(self._coming)} more summands are to come"
        # Asked while the last shard is open, it is about to make its row whole.
        now = self._held if self._node is None else {**self._held, self._node: self._open[-1]}
        return [now[node] for node in sorted(now)]


def _put(views: Sequence[Tensor], tensor: Tensor | None, *, adds: bool) -> None:
    """Write a tensor to the first row or add it there, and add each row to the next one."""
    first = views[0]
    if tensor is None:
        if not adds:
            first.fill_(-0.0 if first.is_floating_point() else 0)
    elif adds:
        first.add_(tensor.to(first.dtype))  # a leaf is rounded as if it had been written
    else:
        first.copy_(tensor)
    for part, whole in pairwise(views):
        whole.add_(part)


def _put_tallied(
    pieces: Sequence[Sequence[Piece]], views: Sequence[Tensor], tensor: Tensor | None, tally: Tally, *, adds: bool
) -> None:
    """The same for views that make up these pieces of each row."""
    for rows in pieces if adds else ():
        for row in rows:
            tally.read(row.values, row.start)
    _put(views, tensor, adds=adds)
    for rows in pieces:
        tally.wrote(rows[-1].values, rows[-1].start)


def _cut_alike(tensor: Tensor | None, view: Tensor, pieces: int) -> Sequence[Tensor] | None:
    """A tensor's memory in as many pieces as the row's, if both lie alike; None if it must be taken as a whole."""
    if pieces == 1 or tensor is None or tensor.stride() != view.stride():
        return None
    pieces_of_it: tuple[Tensor, ...] = tensor.as_strided((tensor.numel(),), (1,)).split(PIECE)
    return pieces_of_it
