"""The state that a host's workers share, and what one of them needs to finish an update without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.failpoints import failpoint
from unisono.reduce.buckets import Bucket
from unisono.reduce.partial_sums import views_of
from unisono.reduce.segment import elements, flats_in, starts_of
from unisono.reduce.transport import Transport
from unisono.train.step.pieces import UpdatePiece, pieces_of
from unisono.train.step.script_memory import Kind, Rows, ShownState

_APART = 64
"""Words between the marks of two workers, whose caches then do not get into each other's way."""

_PIECES = 2**32
"""A mark is so many times the number of the update, and twice the pieces that are done, and one if another is begun."""


def kinds_in(held: Mapping[int, Sequence[Kind]]) -> list[Kind]:
    """All that optimizers keep of any parameter."""
    return list(dict.fromkeys(kind for kinds in held.values() for kind in kinds))


class PieceStage(Enum):
    """How far a piece of an update has come."""

    OLD = "nobody has touched it"
    BEGUN = "what it was is in the scratch of its worker"
    DONE = "it is updated"


@dataclass(frozen=True, slots=True)
class CopiedPiece:
    """A piece in memory of this worker's own.

    Attributes:
        piece: the piece.
        is_done: whether it is updated.
        words: the sum of its words, as its worker had left them.
    """

    piece: UpdatePiece
    is_done: bool
    words: int


class HostState:
    """Weights and what optimizers keep of them, once for the workers of a host.

    Each updates its own pieces, one after the other, where they lie. Before it touches a piece it copies it to its
    scratch, which fits the cache, and marks it as begun; behind, as done. Only it writes its marks. So whoever has the
    gradient can make the whole update by itself, in memory of its own, whatever has become of the others: they may be
    gone, stand still, or go on meanwhile. Beside its marks each leaves the sums of its pieces' words, by which a bit
    that has flipped since is known.

    Args:
        buckets: the layout of the parameters.
        kinds: what optimizers keep of each parameter, by its number.
        transport: the transport between the workers. Making an object of this class is collective.
        shown: the memory in which the script sees it; what it writes there, no other worker sees.
        keeps: whether workers keep pieces before they touch them. Else nobody can copy it in the middle of an update.

    Attributes:
        kinds: what is kept of any parameter.
        shown: the memory in which the script sees it, from :meth:`show` on.
        rows: the memory.
        pieces: this worker's pieces.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        kinds: Mapping[int, Sequence[Kind]],
        transport: Transport,
        shown: ShownState,
        *,
        keeps: bool = True,
    ) -> None:
        assert transport.seat is not None, "these workers share memory"
        self._worker, workers = transport.seat
        self._buckets, self._held = buckets, kinds
        self.kinds = kinds_in(kinds)
        self._pieces = [pieces_of(buckets, worker, workers) for worker in range(workers)]
        everybody = chain.from_iterable(self._pieces) if keeps else ()
        self._most = max(map(self._kept_bytes, everybody), default=0)
        self._pieces_at_most = max(map(len, self._pieces))
        size = -(-2 * workers * self._pieces_at_most // _APART) * _APART
        own = [
            Bucket((), workers * _APART, torch.int64, torch.device("cpu")),
            Bucket((), size, torch.int64, torch.device("cpu")),
            Bucket((), workers * self._most, torch.uint8, torch.device("cpu")),
        ]
        everything = [bucket for layout in (*shown.layouts, own) for bucket in layout]
        self._segment = transport.share(starts_of(everything)[-1])
        flats = iter(flats_in(self._segment.bytes, everything))
        self.rows: Rows = [tuple(next(flats) for _ in layout) for layout in shown.layouts]
        self.shown = shown
        marks, sums, self._scratch = flats
        self._sums: NDArray[np.uint64] = sums.numpy().view(np.uint64)
        self._marks: NDArray[np.int64] = marks.numpy()
        self._order = Lock()
        self.pieces = self._pieces[self._worker]
        self._kept = [
            list(zip(self._scratch_of(self._worker, piece), self._places(piece, self.rows), strict=True))
            if keeps
            else []
            for piece in self.pieces
        ]

    @property
    def nbytes(self) -> int:
        """What it takes, for all workers of this host together."""
        return sum(flat.nbytes for row in self.rows for flat in row) + self._scratch.nbytes

    def show(self) -> None:
        """All workers have filled their pieces: let the script see them."""
        self.shown.show(self._segment)

    def views(self, rows: Rows) -> list[tuple[Tensor, ...]]:
        """Of flat buffers in this layout: for the weights and each kind, a tensor per parameter."""
        return [views_of(self._buckets, row) for row in rows]

    def begin(self, sums: Sequence[int]) -> None:
        """This worker's pieces are there: let all know the sums of their words."""
        for place, each in enumerate(sums):
            for number in range(2):
                self._sums[self._place_of_sum(number, self._worker, place)] = each

    def update(self, number: int, change: Callable[[int], int]) -> None:
        """Update this worker's pieces.

        Args:
            number: the number of the update: 1, 2, 3 …
            change: a function that gets the number of a piece, updates it where it lies, and returns the sum of its
                words.
        """
        for place, kept in enumerate(self._kept):
            for scratch, values in kept:
                scratch.copy_(values)
            failpoint("piece kept")
            self._mark(number, 2 * place + 1)
            failpoint("piece begun")
            self._sums[self._place_of_sum(number, self._worker, place)] = change(place)
            failpoint("piece updated")
            self._mark(number, 2 * place + 2)
            failpoint("piece done")

    def copied(self, number: int) -> tuple[Rows, list[CopiedPiece]]:
        """All of it in memory of this worker's own, after an update or in the middle of one.

        Args:
            number: the number of the update, in which others may still be.

        Returns:
            the memory, and all pieces there.
        """
        rows = [tuple(torch.zeros_like(flat) for flat in row) for row in self.rows]
        copied = [
            self._copied(number, worker, place, rows)
            for worker, pieces in enumerate(self._pieces)
            for place in range(len(pieces))
        ]
        return rows, copied

    def _copied(self, number: int, worker: int, place: int, rows: Rows) -> CopiedPiece:
        """Copy a piece as it was, or as it is to be: what its worker overwrites meanwhile is copied again."""
        piece = self._pieces[worker][place]
        while True:
            stage = self._stage(number, worker, place)
            places = self._places(piece, self.rows)
            source = self._scratch_of(worker, piece) if stage is PieceStage.BEGUN else places
            for copy, values in zip(self._places(piece, rows), source, strict=True):
                copy.copy_(values)
            if self._stage(number, worker, place) is stage:
                is_done = stage is PieceStage.DONE
                told = self._sums[self._place_of_sum(number if is_done else number - 1, worker, place)]
                return CopiedPiece(piece, is_done, int(told))

    def _stage(self, number: int, worker: int, place: int) -> PieceStage:
        self._in_order()
        update, steps = divmod(int(self._marks[worker * _APART]), _PIECES)
        self._in_order()
        done = steps // 2
        if update != number or place > done:
            return PieceStage.OLD
        if place < done:
            return PieceStage.DONE
        return PieceStage.BEGUN if steps % 2 else PieceStage.OLD

    def _mark(self, number: int, steps: int) -> None:
        self._in_order()
        self._marks[self._worker * _APART] = number * _PIECES + steps
        self._in_order()

    def _in_order(self) -> None:
        """What this worker has read and written before, others see before what it does next.

        x86 keeps that order by itself. Elsewhere nothing sinks below the release of a lock, nor rises above the next
        acquisition of it. Of a worker that is dead, all that it did is seen anyway.
        """
        for _ in range(2):
            with self._order:
                pass

    def _place_of_sum(self, number: int, worker: int, place: int) -> int:
        """That of one update stays until the one after the next."""
        return (number % 2 * len(self._pieces) + worker) * self._pieces_at_most + place

    def _places(self, piece: UpdatePiece, rows: Rows) -> list[Tensor]:
        return [rows[row][piece.bucket][piece.start : piece.stop] for row in self._rows_of(piece)]

    def _rows_of(self, piece: UpdatePiece) -> Iterator[int]:
        """The weights, and what is kept of any parameter of a piece."""
        held = {kind for each in piece.slices for kind in self._held.get(each.number, ())}
        yield 0
        yield from (number for number, kind in enumerate(self.kinds, 1) if kind in held)

    def _scratch_of(self, worker: int, piece: UpdatePiece) -> Iterator[Tensor]:
        offset = worker * self._most
        for row in self._rows_of(piece):
            dtype, numel = self._dtype(row, piece), piece.stop - piece.start
            yield elements(self._scratch, offset, numel, dtype)
            offset += numel * dtype.itemsize

    def _dtype(self, row: int, piece: UpdatePiece) -> torch.dtype:
        return self.kinds[row - 1][1] if row else self._buckets[piece.bucket].dtype

    def _kept_bytes(self, piece: UpdatePiece) -> int:
        return sum((piece.stop - piece.start) * self._dtype(row, piece).itemsize for row in self._rows_of(piece))
