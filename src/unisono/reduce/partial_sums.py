"""The partial sums that one worker keeps while it computes its shards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from unisono.plan.tree import SummationTree
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
    """

    flat: Tensor
    views: tuple[Tensor, ...]
    pieces: tuple[tuple["Piece", ...], ...]

    @classmethod
    def of(cls, bucket: Bucket, flat: Tensor) -> "PartialSumRow":
        """A row in this buffer."""
        return cls(flat, tuple(bucket.views(flat)), tuple(_pieces(entry, flat) for entry in bucket.entries))


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
        Piece(
            start,
            Words(values) if flat.device.type == "cpu" else values,
            flat[start : min(start + PIECE, entry.offset + numel)],
        )
        for start in range(entry.offset, stop, PIECE)
        for values in (flat[start : min(start + PIECE, stop)],)
    )


def views_of(buckets: Sequence[Bucket], flats: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Every tensor's view of the buckets' buffers, in the order of the tensors' list."""
    placed = {
        entry.index: entry.view(flat) for bucket, flat in zip(buckets, flats, strict=True) for entry in bucket.entries
    }
    return tuple(placed[index] for index in range(len(placed)))


class PartialSums:
    """Adds up the shards' parts of a bucket along the summation tree, tensor by tensor as they arrive.

    A left leaf is written into a row, its sibling is added onto it, and siblings among the rows become one, all while
    the tensor is still in the cache. Rows are allocated once and used again in every step: for a power of two of shards
    (up to 512) at most log2(shards)+1 of them.

    Args:
        tree: the summation tree.
        shards: the shards of this worker.
        rows: the rows: as many as ``tree.most_kept`` of these shards; one without shards, which tells what the buckets
            are like.
    """

    def __init__(self, tree: SummationTree, shards: range, rows: Sequence[PartialSumRow]) -> None:
        self._merge_counts = tree.merges(shards.start, shards.stop)
        self._free = list(rows)
        self._stack: list[PartialSumRow] = []
        self._merges: list[int] = []

    def begin(self) -> None:
        """Start over; this worker's shards follow from first to last."""
        self._free.extend(self._stack)
        self._stack = []
        self._merges = list(reversed(self._merge_counts))

    def open(self) -> None:
        """The next shard begins: every one of its tensors is put once, in any order."""
        if not self._merges[-1]:
            self._stack.append(self._free.pop())

    def put(self, number: int, tensor: Tensor | None, tally: Tally | None = None) -> None:
        """Take one tensor of the shard, and add the siblings that this makes whole.

        An absent one counts as -0.0, the identity of float addition.

        Args:
            number: the tensor's number among the bucket's entries.
            tensor: a tensor of the row's dtype, or of a wider one, which is rounded; None for an absent gradient.
            tally: the tally of the bucket, if its memory is checked.
        """
        merges = self._merges[-1]
        views = [self._stack[-depth].views[number] for depth in range(1, max(merges, 1) + 1)]
        if tally is None:
            _put(views, tensor, adds=merges > 0)
            return
        pieces = list(zip(*(self._stack[-depth].pieces[number] for depth in range(1, len(views) + 1)), strict=True))
        sources = _cut_alike(tensor, views[0], len(pieces))
        if sources is None:
            _put_tallied(pieces, views, tensor, tally, adds=merges > 0)
            return
        for rows, source in zip(pieces, sources, strict=True):
            _put_tallied([rows], [row.used for row in rows], source, tally, adds=merges > 0)

    def close(self) -> None:
        """The shard is done: all its tensors were put."""
        for _ in range(1, self._merges.pop()):
            self._free.append(self._stack.pop())

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
        if not self._merge_counts:
            return self._free
        # Asked while the last shard is open, the rows that it makes whole still lie on the stack.
        merged = max(0, self._merges[-1] - 1) if self._merges else 0
        assert len(self._merges) <= 1, f"{len(self._merges) - 1} more shards are to come"
        return self._stack[: len(self._stack) - merged]


def _put(views: Sequence[Tensor], tensor: Tensor | None, *, adds: bool) -> None:
    """Write a tensor to the topmost row or add it there, and add each row to the one below it."""
    top = views[0]
    if tensor is None:
        if not adds:
            top.fill_(-0.0 if top.is_floating_point() else 0)
    elif adds:
        top.add_(tensor.to(top.dtype))  # a leaf is rounded as if it had been written
    else:
        top.copy_(tensor)
    for upper, lower in pairwise(views):
        lower.add_(upper)


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
