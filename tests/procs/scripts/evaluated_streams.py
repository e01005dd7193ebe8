"""A script that evaluates on a stream of the kind ``STREAM`` in its epochs, and predicts on it in the end."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import unisono

SIZES = [17, 3, 40, 22, 9, 31, 0, 28, 1]
IDS = [100 * file + number for file, size in enumerate(SIZES) for number in range(size)]


def read(ids: list[int]) -> Iterator[tuple[torch.Tensor, int]]:
    for number in ids:
        if "LEDGER" in os.environ:
            with (Path(os.environ["LEDGER"]) / "read").open("a") as file:
                file.write(f"{number}\n")
        yield torch.sin(number + torch.arange(6.0)) + 0.1 * torch.randn(6) + 0.1 * random.random(), number


class Split(IterableDataset[Any]):
    """Splits its files among the readers."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        files = range(len(SIZES))[info.id :: info.num_workers]
        return read([100 * file + number for file in files for number in range(SIZES[file])])


class Whole(IterableDataset[Any]):
    """All of it for whoever reads."""

    def __init__(self, ids: list[int] = IDS) -> None:
        self.ids = ids

    def __iter__(self) -> Iterator[Any]:
        return read(self.ids)


class Tail:
    """Its first reader has nothing, and the last one most."""

    def open_reader(self, number: int, readers: int) -> Iterator[Any]:
        bounds = [0, *(each * each for each in range(readers - 1)), len(IDS)]
        return read(IDS[bounds[number] : bounds[number + 1]])


streams: dict[str, Callable[[], Any]] = {
    "split": Split,
    "whole": Whole,
    "tail": Tail,
    "one": lambda: Whole([7]),
    "loader": lambda: DataLoader(Split(), 5),
}

run = unisono.init(batch_size=48, shards=6, seed=3, faults={"timeout_s": 30}, arithmetic={"threads": 1})
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 5))
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
training = TensorDataset(torch.arange(576.0).sin().reshape(96, 6), torch.arange(96) % 5)
stream = streams[os.environ["STREAM"]]()


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1] % 5)


def metrics(model: Any, batch: Any) -> dict[str, Any]:
    ids = unisono.Weighted(batch[1].double().mean(), len(batch[1]))
    return {"loss": loss_of(model, batch), "ids": ids, "draws": torch.rand(())}


def total(model: Any, batch: Any) -> torch.Tensor:
    return torch.cat([model(batch[0]).sum(0), torch.tensor([1.0, len(batch[0])])])


def numbers(number: int, batch: Any) -> list[Any]:
    return [number, batch[1]]


for step in run.steps(training, epochs=3):
    step.run(loss_of)
    if step.is_last_in_epoch:
        found = run.evaluate(stream, metrics)
        run.log("validation", found["loss"])
        run.print(f"epoch {step.epoch}: {sorted(found.items())}")
outputs = run.predict(stream, lambda model, batch: {"rows": model(batch[0]), "ids": batch[1]})
evaluator = run.inside.evaluator
sums = evaluator.carry_out(lambda one: one.sums(total), stream, None, None)
blocks = evaluator.carry_out(lambda one: one.values(numbers), stream, None, None)
ids = [number for _, some in blocks for number in some.tolist()]
run.print(f"after predict {outputs['ids'].tolist()} {outputs['rows'].double().sum().item()}")
run.print(f"after sums {sums.tolist()}")
run.print(f"after values {sorted(number for number, _ in blocks)} {sorted(ids)}")
run.finish()
