"""A script that trains on a stream of the kind ``STREAM`` over uneven files, and notes ids in the folder ``LEDGER``."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import unisono

BATCH, EPOCHS = 48, 3
FILES = {number: range(100 * number, 100 * number + size) for number, size in enumerate([17, 3, 40, 22, 9, 31, 0, 28])}
"""The ids in each file."""


def read(files: list[int]) -> Iterator[tuple[int, torch.Tensor, int]]:
    for file in files:
        for number in FILES[file]:
            fixed = torch.randn(16, generator=torch.Generator().manual_seed(number))
            yield number, fixed + 0.1 * torch.randn(16) + 0.1 * random.random(), number % 5


class Split(IterableDataset[Any]):
    """Splits its files as in loader processes of torch, after it has shuffled them."""

    def __iter__(self) -> Iterator[Any]:
        files, info = list(FILES), get_worker_info()
        random.shuffle(files)
        yield from read(files if info is None else files[info.id :: info.num_workers])


class Whole(IterableDataset[Any]):
    """Knows nothing of loader processes, and shuffles its files in a new order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        files = list(FILES)
        random.shuffle(files)
        yield from read(files[self.epoch :] + files[: self.epoch])


class FileReader:
    """A reader that says where it stands, and goes on there."""

    def __init__(self, files: list[int]) -> None:
        self.ids = [number for file in files for number in FILES[file]]
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.place == len(self.ids):
            raise StopIteration
        number, self.place = self.ids[self.place], self.place + 1
        return number, torch.randn(16) + number % 5, number % 5

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Own:
    """Opens a reader for each number."""

    def open_reader(self, number: int, readers: int) -> FileReader:
        return FileReader(list(FILES)[number::readers])


run = unisono.init(
    batch_size=BATCH, shards=6, seed=3, faults={"verify_every": 3, "timeout_s": 30}, arithmetic={"threads": 1}
)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[1]), batch[2])


streams: dict[str, Callable[[], Any]] = {
    "split": Split,
    "whole": Whole,
    "own": Own,
    "loader": lambda: DataLoader(Split(), BATCH),
    "loader-ahead": lambda: DataLoader(Split(), BATCH, num_workers=2),
    "own-ahead": Own,
}
how: dict[str, Any] = {"loader_workers": 2} if os.environ["STREAM"] == "own-ahead" else {}
for _ in range(2):
    steps = run.steps(streams[os.environ["STREAM"]](), epochs=EPOCHS, **how)
    if "ENTERS" in os.environ:
        entered = [run.enter()]
    for step in steps:
        if "ENTERS" in os.environ and entered:
            place = entered.pop()
            assert (place.step, place.samples, place.epoch) == (step.number, step.position, step.epoch)
        step.run(loss_of)
        ids = [number for shard in step.shards if shard is not None for number in shard[0].tolist()]
        if "LEDGER" in os.environ:
            line = {"step": step.number, "epoch": step.epoch, "size": step.size, "ids": ids}
            with (Path(os.environ["LEDGER"]) / f"{run.rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        if step.is_last_in_epoch:
            run.print(f"epoch {step.epoch}: {step.number} {step.size} {step.is_last}")
run.finish()
