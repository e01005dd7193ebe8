"""What a host's workers share can be copied whole at any moment of an update, whoever is in the middle of it."""

import os
from collections.abc import Sequence
from threading import Thread

import pytest
import torch
from torch import Tensor

from unisono.reduce.buckets import plan_buckets
from unisono.reduce.segment import PAGE, Segment, created, pages
from unisono.reduce.transport import Solo
from unisono.testing.fault import listening
from unisono.train.step.host_state import HostState
from unisono.train.step.pieces import UpdatePiece, pieces_of
from unisono.train.step.script_memory import Kind, ShownState

pytestmark = pytest.mark.unit

SHAPES = [(300,), (5,), (40, 10), (), (64,), (700,)]
BUCKETS = plan_buckets([torch.zeros(shape) for shape in SHAPES], 2048)
MOMENTUM: Kind = ("momentum_buffer", torch.float32)
KEPT = {number: [MOMENTUM] for number in range(len(SHAPES))}


class Seated(Solo):
    """Shares memory with whoever has the same file."""

    def __init__(self, place: int, places: int, memory: int) -> None:
        super().__init__(1)
        self._seat, self._memory = (place, places), memory

    @property
    def seat(self) -> tuple[int, int]:
        return self._seat

    def share(self, size: int) -> Segment:
        os.ftruncate(self._memory, pages(size))
        return Segment(os.dup(self._memory), pages(size))


def sharing(workers: int) -> list[HostState]:
    memory = created(PAGE)
    shown = ShownState(BUCKETS, [MOMENTUM])
    found = [HostState(BUCKETS, KEPT, Seated(worker, workers, memory), shown) for worker in range(workers)]
    os.close(memory)
    for row in found[0].rows:
        for flat in row:
            flat.copy_(torch.arange(flat.numel()))
    return found


def changed(rows: Sequence[tuple[Tensor, ...]], piece: UpdatePiece) -> list[Tensor]:
    return [row[piece.bucket][piece.start : piece.stop] for row in rows]


def trouble_with(state: HostState, number: int) -> list[float]:
    """Finish an update alone, in which every number is to become one more; tell what did not."""
    rows, copied = state.copied(number)
    for each in copied:
        for values in [] if each.is_done else changed(rows, each.piece):
            values.add_(1)
    found: list[float] = []
    for row in rows:
        for bucket, flat in enumerate(row):
            in_pieces = torch.zeros_like(flat, dtype=torch.bool)
            for worker in range(3):
                for piece in pieces_of(BUCKETS, worker, 3):
                    if piece.bucket == bucket:
                        in_pieces[piece.start : piece.stop] = True
            assert bool(in_pieces.all())
            found += (flat - torch.arange(flat.numel()) - 1).nonzero().flatten().tolist()
    return found


def test_pieces_cover_every_bucket_once_at_multiples_of_64() -> None:
    for workers in (1, 2, 3, 5):
        pieces = [piece for worker in range(workers) for piece in pieces_of(BUCKETS, worker, workers, size=128)]
        for number, bucket in enumerate(BUCKETS):
            edges = sorted((piece.start, piece.stop) for piece in pieces if piece.bucket == number)
            assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
            assert edges[-1][1] == bucket.numel
            assert not any(edge % 64 for pair in edges for edge in pair)
            assert all(stop - start <= 128 for start, stop in edges)
        counted = [0] * len(SHAPES)
        for piece in pieces:
            for part in piece.slices:
                counted[part.number] += part.stop - part.start
        assert counted == [torch.Size(shape).numel() for shape in SHAPES]


def test_an_update_can_be_finished_alone_at_every_moment_of_it() -> None:
    looker, first, second = sharing(3)
    moments, wrong = list[str](), list[tuple[str, list[float]]]()

    def look(moment: str) -> None:
        moments.append(moment)
        if found := trouble_with(looker, 7):
            wrong.append((moment, found))

    def change(state: HostState, place: int) -> int:
        for values in changed(state.rows, state.pieces[place]):
            half = len(values) // 2
            values[:half].add_(1)
            look("half changed")
            values[half:].add_(1)
        return 0

    look("nothing is done")
    with listening(look):
        for state in (first, second):
            state.update(7, lambda place, state=state: change(state, place))  # type: ignore[misc]
    assert wrong == []
    assert {"piece kept", "piece begun", "half changed", "piece updated", "piece done"} <= set(moments)


def test_a_copy_that_is_made_while_others_go_on_is_whole() -> None:
    for number in range(1, 40):
        looker, first, second = sharing(3)

        def change(state: HostState, place: int) -> int:
            for values in changed(state.rows, state.pieces[place]):
                for each in values.split(64):
                    each.add_(1)
            return 0

        threads = [
            Thread(target=state.update, args=(number, lambda place, state=state: change(state, place)))
            for state in (first, second)
        ]
        for thread in threads:
            thread.start()
        found = trouble_with(looker, number)
        for thread in threads:
            thread.join()
        assert found == []
        assert trouble_with(looker, number) == []


def test_what_was_marked_in_the_update_before_counts_for_nothing_in_this_one() -> None:
    looker, first = sharing(2)
    for state in (looker, first):
        state.update(1, lambda place: 10 + place)
    assert all(each.is_done for each in looker.copied(1)[1])
    assert not any(each.is_done for each in looker.copied(2)[1])


def test_a_copied_piece_comes_with_the_sum_that_its_worker_has_left() -> None:
    looker, first = sharing(2)
    for state in (looker, first):
        state.begin([5] * len(state.pieces))
    assert {each.words for each in looker.copied(1)[1]} == {5}
    looker.update(1, lambda place: 6)
    assert {(each.is_done, each.words) for each in looker.copied(1)[1]} == {(True, 6), (False, 5)}
    first.update(1, lambda place: 6)
    looker.update(2, lambda place: 7)
    assert {(each.is_done, each.words) for each in looker.copied(2)[1]} == {(True, 7), (False, 6)}
