"""Loaders of torchdata: the states of their streams are used where they are exact, one reader for each shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import unisono
from unisono.data.stream_reader import Reader, ReaderKey, ReaderState
from unisono.errors import DataError

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("one_worker"),
    pytest.mark.filterwarnings("ignore:'set_vital'"),  # which torchdata calls
]

Start = Callable[..., unisono.Run]


class Numbers(IterableDataset[Any]):
    """Says itself where it stands, and counts what it reads."""

    read = 0

    def __init__(self, *, splits: bool = True) -> None:
        self.place, self.splits = 0, splits

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.splits else None
        numbers = range(40) if info is None else range(40)[info.id :: info.num_workers]
        while self.place < len(numbers):
            self.place, Numbers.read = self.place + 1, Numbers.read + 1
            yield numbers[self.place - 1], float(torch.rand(()))
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Iterating(Numbers):
    """Its iterator says where it stands."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        return Going(range(40) if info is None else range(40)[info.id :: info.num_workers])


class Going:
    def __init__(self, numbers: range) -> None:
        self.numbers, self.place = numbers, 0

    def __iter__(self) -> Going:
        return self

    def __next__(self) -> Any:
        if self.place == len(self.numbers):
            raise StopIteration
        self.place, Numbers.read = self.place + 1, Numbers.read + 1
        return self.numbers[self.place - 1], float(torch.rand(()))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Late(Numbers):
    """Counts a sample only when it is asked for the next one."""

    def __iter__(self) -> Iterator[Any]:
        while self.place < 40:
            yield self.place, 0.0
            self.place += 1


def rows(parts: list[int]) -> Iterator[dict[str, int]]:
    for part in parts:
        yield from ({"number": 10 * part + number} for number in range(10))


def streamed() -> Any:
    from datasets import IterableDataset as Streamed  # takes a second to load

    return Streamed.from_generator(rows, gen_kwargs={"parts": list(range(4))})


def reader(stream: Any, number: int, at: ReaderState | None = None, readers: int = 3) -> Reader:
    return Reader(stream, ReaderKey(5, 0, 0, 1, number, readers), at or ReaderState(), keeps=True)


STREAMS: list[Callable[[], Any]] = [Numbers, Iterating, lambda: Numbers(splits=False), streamed]


@pytest.mark.parametrize("make", STREAMS, ids=["own", "iterator", "whole", "hugging face"])
@pytest.mark.parametrize("before", [1, 4, 12])
@pytest.mark.parametrize("readers", [1, 3])
def test_a_reader_goes_on_from_the_state_as_if_it_had_read_those_before(make: Any, before: int, readers: int) -> None:
    whole, cut = reader(make(), 0, readers=readers).take(40), reader(make(), 0, readers=readers)
    assert cut.take(before) == whole[:before]
    assert cut.at.state is not None
    torch.rand(3)
    again = reader(make(), 0, cut.at, readers=readers)
    assert again.take(40) == whole[before:] == cut.take(40)
    assert again.is_over


@pytest.mark.parametrize("make", [Numbers, Iterating])
def test_what_was_given_is_not_read_again(make: Any) -> None:
    at = reader(make(), 1)
    at.take(10)
    Numbers.read = 0
    reader(make(), 1, at.at).take(1)
    assert Numbers.read == 2  # with the one that it looks ahead


def losses(run: unisono.Run, data: Any) -> list[float]:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.fill_(0.0)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def loss_fn(model: Any, batch: Any) -> Any:
        values = batch["number"] if isinstance(batch, dict) else batch[0]
        return model(values.reshape(-1, 1).float()).square().mean()

    return [step.run(loss_fn) for step in run.steps(data, epochs=2)]


def test_a_loader_over_a_stream_gives_what_torchs_gives(start: Start, tmp_path: Any) -> None:
    kept, plain = (
        losses(start(run_dir=tmp_path / kind.__name__), kind(Numbers(), 32))
        for kind in (StatefulDataLoader, DataLoader)
    )
    assert len(kept) == 4
    assert kept == plain


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_over_a_data_set_is_taken_like_torchs(start: Start, tmp_path: Any, shuffle: bool) -> None:
    data = TensorDataset(torch.arange(70.0).unsqueeze(1))
    with start(run_dir=tmp_path / "run") as run:
        found = losses(run, StatefulDataLoader(data, 32, shuffle=shuffle))
    assert len(found) == 6
    with pytest.raises(unisono.errors.JobError, match="the loader has batch_size=16, the job has batch_size=32"):
        losses(start(run_dir=tmp_path / "other"), StatefulDataLoader(data, 16, shuffle=shuffle))


@pytest.mark.parametrize(
    ("make", "name"),
    [(Late, "Late"), (lambda: streamed().shuffle(seed=1, buffer_size=8), "IterableDataset")],
    ids=["late", "buffer"],
)
def test_a_state_that_loses_samples_is_refused(start: Start, make: Any, name: str) -> None:
    with pytest.raises(DataError, match=f"{name} does not go on from the state that it told"):
        losses(start(), StatefulDataLoader(make(), 32))
