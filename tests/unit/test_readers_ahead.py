"""Readers of a stream in loader processes: the same samples, states and bits as without."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import unisono
from unisono.data.generators import generators_kept
from unisono.data.loading import Processes
from unisono.data.sample_order import LoopKey
from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import OpenReaders, Readers, ReadersAhead, Wish
from unisono.errors import DataError

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

READERS, EPOCHS = 5, 3
Start = Callable[..., unisono.Run]


class Numbers(IterableDataset[Any]):
    """Parts of different length, and one that is empty. Notes in a file who has read what."""

    def __init__(self, notes: Path | None = None, broken: int = -1) -> None:
        self.notes, self.broken = notes, broken

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for number in range(100 * info.id, 100 * info.id + 7 * (info.id % 3)):
            if number == self.broken:
                raise OSError("the file is broken")
            if self.notes is not None:
                with self.notes.open("a") as file:
                    file.write(f"{os.getpid()} {number}\n")
            yield number, float(torch.rand(()))


def opened(stream: Any) -> OpenReaders:
    return OpenReaders(stream, LoopKey(5, 0), READERS)


@pytest.fixture
def ahead() -> Iterator[Callable[..., Readers]]:
    made: list[Readers] = []

    def make(stream: Any, count: int = 2) -> Readers:
        made.append(ReadersAhead(opened(stream), Processes(count, 30), EPOCHS))
        return made[-1]

    with generators_kept():
        yield make
    for one in made:
        one.close()


def read(readers: Readers, numbers: range, steps: int, samples: int = 3) -> list[Any]:
    """What some readers give in so many steps, epoch after epoch, and in which states."""
    found: list[Any] = []
    states = dict.fromkeys(numbers, ReaderState())
    epoch = 0
    for _ in range(steps):
        wishes = [Wish(epoch, number, at, samples) for number, at in states.items()]
        readers.expect(wishes)
        given = [readers.give(wish) for wish in wishes]
        batches = [readers.batch(wish) for wish in wishes]
        found.append((given, [None if one is None else [part.tolist() for part in one] for one in batches]))
        states = {one.number: one.after for one in given}
        if all(one.is_over for one in given):
            epoch, states = epoch + 1, dict.fromkeys(numbers, ReaderState())
    return found


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("numbers", [range(READERS), range(1, 3), range(3, 4)])
def test_processes_give_what_this_process_would_give(count: int, numbers: range, ahead: Callable[..., Readers]) -> None:
    steps = EPOCHS * (5 if 2 in numbers else 1)
    assert read(ahead(Numbers(), count), numbers, steps) == read(opened(Numbers()), numbers, steps)


def test_samples_are_read_in_processes_and_ahead(ahead: Callable[..., Readers], tmp_path: Path) -> None:
    readers = ahead(Numbers(tmp_path / "notes"), 1)
    read(readers, range(2, 3), 3)
    lines = (tmp_path / "notes").read_text().split()
    assert str(os.getpid()) not in lines[::2]
    assert len(lines) // 2 >= 9 + 1


def test_what_was_given_last_is_given_again(ahead: Callable[..., Readers]) -> None:
    readers = ahead(Numbers())
    first = Wish(0, 2, ReaderState(), 4)
    readers.expect([first])
    given, (numbers, _) = readers.give(first), readers.batch(first)
    readers.expect([first])
    assert readers.give(first) is given
    assert readers.batch(first)[0] is numbers


def test_readers_go_back_go_elsewhere_and_read_other_numbers_of_samples(ahead: Callable[..., Readers]) -> None:
    here, there = ahead(Numbers()), opened(Numbers())
    for numbers, at, samples in (
        (range(5), 0, 3), (range(5), 3, 3), (range(5), 3, 2), (range(5), 0, 2), (range(1, 3), 2, 2), (range(4), 4, 1),
    ):  # fmt: skip
        wishes = [Wish(1, number, ReaderState(min(at, 7 * (number % 3))), samples) for number in numbers]
        for one in (here, there):
            one.expect(wishes)
        assert [here.give(wish) for wish in wishes] == [there.give(wish) for wish in wishes]
        for wish in wishes:
            mine, theirs = here.batch(wish), there.batch(wish)
            assert (mine is None) == (theirs is None)
            assert mine is None or all(map(torch.equal, mine, theirs))


def test_a_reader_of_another_worker_is_read_here(ahead: Callable[..., Readers]) -> None:
    readers = ahead(Numbers())
    read(readers, range(2), 1)
    other = Wish(0, 2, ReaderState(), 3)
    assert readers.batch(other)[0].tolist() == [200, 201, 202]
    assert read(readers, range(2), 1) == read(opened(Numbers()), range(2), 1)


def test_an_error_in_a_reader_comes_in_its_turn_and_says_what_was_read(ahead: Callable[..., Readers]) -> None:
    readers = ahead(Numbers(broken=207))
    with pytest.raises(DataError, match="could not load the next samples of the stream's readers 0, 2, 4: OSError"):
        read(readers, range(READERS), 3)
    again = ahead(Numbers(broken=207))
    assert read(again, range(READERS), 2) == read(opened(Numbers()), range(READERS), 2)


def test_batches_that_are_kept_are_not_overwritten(ahead: Callable[..., Readers]) -> None:
    readers, kept = ahead(Numbers(), 1), []
    at = ReaderState()
    for _ in range(14):
        wish = Wish(0, 2, at, 1)
        readers.expect([wish])
        at = readers.give(wish).after
        kept.append(readers.batch(wish)[0])
    assert torch.cat(kept).tolist() == list(range(200, 214))


# -- loops ------------------------------------------------------------------------------------------------------------


class Pairs(IterableDataset[Any]):
    """Split by whoever opens a copy of it, as in the documentation of torch."""

    def __init__(self) -> None:
        self.begin, self.end = 0, 70

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.begin, self.end):
            yield torch.sin(number + torch.arange(6.0)) + 0.1 * torch.randn(6), number % 3


def splitting(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == number
    each = -(-70 // info.num_workers)
    stream: Any = info.dataset
    stream.begin, stream.end = each * number, min(70, each * (number + 1))


def setting(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    stream: Any = info.dataset
    stream.begin = 5 * number


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(run: unisono.Run, data: Any, **how: Any) -> tuple[str, list[int], float]:
    model = nn.Linear(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = [step.size for step in run.steps(data, epochs=2, **how) if step.run(loss_of)]
    found = run.evaluate(data, {"loss": loss_of})["loss"]
    return run.finish(model), sizes, found


@pytest.mark.parametrize("begin", [None, splitting])
def test_bits_are_the_same_with_any_number_of_processes(begin: Any, start: Start, tmp_path: Path) -> None:
    found = [
        trained(start(run_dir=tmp_path / f"{count}"), DataLoader(Pairs(), 32, num_workers=count, worker_init_fn=begin))
        for count in (0, 1, 2)
    ]
    assert found[0] == found[1] == found[2]
    assert sum(found[0][1]) == 2 * 70
    if begin is None:
        assert found[0][:2] == trained(start(run_dir=tmp_path / "plain"), Pairs(), loader_workers=2)[:2]


def test_a_function_that_changes_the_copies_of_a_stream_has_to_look_how_many_there_are(start: Start) -> None:
    with pytest.raises(DataError, match="worker_init_fn takes the stream out of get_worker_info"):
        trained(start(), DataLoader(Pairs(), 32, worker_init_fn=setting))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_loop_that_is_left_early_leaves_no_process_behind(steps: int, start: Start) -> None:
    run = start()
    model = nn.Linear(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, step in enumerate(run.steps(DataLoader(Pairs(), 32, num_workers=2), epochs=2)):
        if number == steps:
            break
        step.run(loss_of)
