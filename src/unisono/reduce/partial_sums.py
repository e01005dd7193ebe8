"""The partial sums that a worker keeps while it computes its shards, and whether memory keeps them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from unisono.plan.tree import Node, Summand
from unisono.reduce.buckets import ALIGNMENT, Bucket, BucketEntry
from unisono.words import MODULUS, Finiteness, Words

PRIME = 2**63 - 25
"""Modulo which no number of copies hides a flipped bit: 2 times 2**63 is nothing modulo 2**64."""

Witness = Callable[[str, Tensor], None]
"""Shown what was just written, before anybody reads it; ``partial_sum``, ``gradient`` or ``shard_buffer`` says what."""


class Tally:
    """The sum of the 64-bit words that were written to a bucket's buffers, less those that were read from them.

    The worker that writes a partial sum adds its words, the worker that reads it subtracts them. Over all workers
    nothing is left if every word was read as it was written; a bit that flipped in between leaves its power of two.
    Of what all workers get a copy, each takes off what it got.

    It also looks at the sums that this worker finishes, all of them: whether they are finite.

    Args:
        start: the first element of the bucket that is looked at.
        stop: the element behind the last one.
        witness: a function that gets what was just written, to inject a fault; see :data:`Witness`.

    Attributes:
        is_empty: whether none of the bucket's elements are looked at.
        balance: the words written less those read on this worker, of memory that is read once.
        copies: the same difference, of memory that every worker gets.
        finished: what tells whether what this worker has finished is finite.
    """

    def __init__(self, start: int = 0, stop: int = 2**62, witness: Witness | None = None) -> None:
        self.balance = self.copies = 0
        self._start, self._stop = start, stop
        self.is_empty = stop <= start
        self._witness = witness
        self.finished = Finiteness()
        self._kept, self._left = list[Words](), list[int]()  # and the sum of each

    def wrote(self, values: Tensor | Words, start: int, copies: int = 0) -> None:
        """Values were written, which somebody will read once.

        Args:
            values: 1-D; given as words, they are summed sooner.
            start: their offset in the bucket, in elements.
            copies: the number of workers, this one included, that receive these very values instead.
        """
        if (part := self._part(values, start)) is not None and copies:
            self.copies += copies * part.sum()
        elif part is not None:
            self.balance += part.sum()
        if self._witness is not None:
            self._witness("partial_sum", values.values if isinstance(values, Words) else values)

    def read(self, values: Tensor | Words, start: int) -> None:
        """Values are about to be read; see :meth:`wrote`."""
        if (part := self._part(values, start)) is not None:
            self.balance -= part.sum()

    def keep(self, values: Tensor | Words, start: int) -> None:
        """Values were written that stay until :meth:`has_kept` asks for them."""
        if (part := self._part(values, start)) is not None:
            self._kept.append(part)
            self._left.append(part.sum())

    def receive(self, values: Tensor, start: int) -> None:
        """Values are here that one worker wrote and all get, and stay: they are read and kept at once."""
        self.keep(values, start)
        if self._part(values, start) is not None:
            self.copies -= self._left[-1]

    def part(self, start: int) -> "Tally":
        """A tally of its own for the elements of this bucket from ``start`` on."""
        part = Tally(self._start - start, self._stop - start, self._witness)
        part.finished = self.finished
        return part

    def close(self, part: "Tally") -> None:
        """Add a part's tally to this one; the memory of the part has been read for the last time."""
        self.balance += part.balance if part.has_kept() else part.balance + 1
        self.copies += part.copies

    def show(self) -> None:
        """Show the kept memory to the witness."""
        for part in self._kept if self._witness is not None else ():
            assert self._witness is not None
            self._witness("gradient", part.values)

    def has_kept(self) -> bool:
        """Whether everything that was kept is as it was."""
        return [*map(Words.sum, self._kept)] == self._left

    def _part(self, values: Tensor | Words, start: int) -> Words | None:
        numel = values.numel()
        begin, end = self._start - start, self._stop - start
        if begin <= 0 and end >= numel > 0:
            return Words(values) if isinstance(values, Tensor) else values
        begin, end = max(begin, 0), min(end, numel)
        if begin >= end:
            return None
        return Words((values if isinstance(values, Tensor) else values.values)[begin:end])


class _Unseeing(Finiteness):
    def look(self, values: Tensor, place: int = -1) -> None:
        pass


UNTALLIED = Tally(0, 0)
"""The tally of buckets that nobody checks: it reads nothing, and so never changes."""

UNTALLIED.finished = _Unseeing()


# Which part of all buffers is looked at in a step, so that all of it is in turn.


def windows(lengths: Sequence[int], size: int, budget: int | None, turn: int) -> list[range]:
    """Return the elements of each buffer that are read: all of them, or equal parts in turn.

    Args:
        lengths: the buffers' lengths, in elements.
        size: bytes of all buffers together.
        budget: bytes that may be looked at in one turn; None for all.
        turn: the number of the turn. As many as there are parts, one after the other, see every element.
    """
    if budget is None or size <= budget:
        return [*map(range, lengths)]
    if budget <= 0:
        return [range(0) for _ in lengths]
    parts = -(-size // budget)
    return [_part(length, turn % parts, parts) for length in lengths]


def _part(length: int, number: int, parts: int) -> range:
    width = -(-length // (ALIGNMENT * parts)) * ALIGNMENT
    start = min(number * width, length)
    return range(start, min(start + width, length))


def is_balanced(balances: Sequence[int], copies: Sequence[int]) -> bool:
    """Whether nothing is left of all workers' tallies."""
    return sum(balances) % MODULUS == 0 and sum(copies) % PRIME == 0


# The partial sums.

PIECE = 2**17
"""Elements that are added and tallied at a time, so that they are read again while they are in the cache."""


@dataclass(frozen=True, slots=True)
class PartialSumRow:
    """A partial sum of a bucket: a flat buffer, and each tensor's view of it.

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
        self._plan = [(summand.siblings, _together(summand)) for summand in summands]
        self._free = list(rows)
        self._held: dict[Node, PartialSumRow] = {}
        self._open: Sequence[PartialSumRow] = ()
        self._node: Node | None = None  # what the open shard makes whole
        self._begun = 0  # so many of them
        self._adds = False

    def begin(self) -> None:
        """Start over; this worker's summands follow, in their order."""
        self._free.extend(self._held.values())
        self._free.extend(self._open)
        self._held, self._open = {}, ()
        self._begun = 0

    def open(self) -> None:
        """Begin the next summand: each of its tensors is put once, in any order."""
        siblings, self._node = self._plan[self._begun]
        self._begun += 1
        self._adds = bool(siblings)
        self._open = [*map(self._held.pop, siblings)] or [self._free.pop()]

    def put(self, number: int, tensor: Tensor | None, tally: Tally = UNTALLIED) -> None:
        """Take one tensor of the shard, and add the siblings that this makes whole.

        An absent one counts as -0.0, the identity of float addition. ``number`` is the tensor's among the bucket's
        entries. A tensor of a wider dtype than the row's is rounded; None is an absent gradient.
        """
        views = [row.views[number] for row in self._open]
        if tensor is not None and tensor.requires_grad:
            tensor = tensor.detach()
        if tally.is_empty:
            _put(views, tensor, adds=self._adds)
            return
        pieces = [*zip(*[row.pieces[number] for row in self._open], strict=True)]
        if len(pieces) == 1 or (sources := _cut_alike(tensor, views[0])) is None:
            _put_tallied(pieces, views, tensor, tally, adds=self._adds)
            return
        for rows, source in zip(pieces, sources, strict=True):
            _put_tallied([rows], [row.used for row in rows], source, tally, adds=self._adds)

    def put_all(self, tensors: Sequence[Tensor | None], tally: Tally = UNTALLIED) -> None:
        """Take all tensors of the shard at once, which are there already: see :meth:`put`.

        A call for each of them would take longer than small ones take to be added.
        """
        first = self._open[0]
        for row in self._open if self._adds and not tally.is_empty else ():
            tally.read(row.values, 0)
        views, present, dtype = list[Tensor](), list[Tensor](), first.flat.dtype
        for view, tensor in zip(first.views, tensors, strict=True):
            if tensor is None:
                _put([view], None, adds=self._adds)
                continue
            views.append(view)
            plain = tensor.detach() if tensor.requires_grad else tensor
            present.append(plain if plain.dtype is dtype or not self._adds else plain.to(dtype))
        if views:
            (torch._foreach_add_ if self._adds else torch._foreach_copy_)(views, present)
        for part, whole in pairwise(self._open):
            whole.flat.add_(part.flat)
        if not tally.is_empty:
            tally.wrote(self._open[-1].values, 0)

    def close(self) -> None:
        """End the shard: all its tensors were put."""
        *merged, whole = self._open
        assert self._node is not None, "a shard is open"
        self._free.extend(merged)
        self._held[self._node] = whole
        self._open, self._node = (), None

    def partials(self) -> list[Tensor]:
        """Return the sums of the whole subtrees in this worker's range, after the last shard.

        All of its tensors were put. The sums are flat buffers, from left to right; one that holds nothing where there
        are no shards.
        """
        return [row.flat for row in self.rows]

    @property
    def rows(self) -> Sequence[PartialSumRow]:
        """The rows that :meth:`partials` are part of."""
        if not self._plan:
            return self._free
        assert self._begun == len(self._plan), f"{len(self._plan) - self._begun} more summands are to come"
        # Asked while the last shard is open, it is about to make its row whole.
        now = self._held if self._node is None else {**self._held, self._node: self._open[-1]}
        return [*map(now.__getitem__, sorted(now))]


def _together(summand: Summand) -> Node:
    nodes = (summand.node, *summand.siblings)
    return Node(min(node.start for node in nodes), max(node.stop for node in nodes))


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
    """Put a tensor into the views that make up these pieces of each row, and tally it."""
    for rows in pieces if adds else ():
        for row in rows:
            tally.read(row.values, row.start)
    _put(views, tensor, adds=adds)
    for rows in pieces:
        tally.wrote(rows[-1].values, rows[-1].start)


def _cut_alike(tensor: Tensor | None, view: Tensor) -> Sequence[Tensor] | None:
    """A tensor's memory in as many pieces as the row's, if both lie alike; None if it must be taken as a whole."""
    if tensor is None or tensor.stride() != view.stride():
        return None
    pieces_of_it: tuple[Tensor, ...] = tensor.as_strided((tensor.numel(),), (1,)).split(PIECE)
    return pieces_of_it
