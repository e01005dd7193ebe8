"""A script that trains on a ``DataLoader`` with the sampler ``SAMPLER``, and with ``LOADERS`` processes."""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import unisono

SAMPLES, BATCH, EPOCHS = 230, 48, 3


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that are drawn anew each time, as augmentation does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        fixed = torch.randn(16, generator=torch.Generator().manual_seed(number))
        return fixed + 0.1 * torch.randn(16) + 0.1 * random.random(), number % 5


class Halves:
    """A sampler that remembers: it goes through one half of the samples after the other, in an order of its own."""

    def __init__(self) -> None:
        self.asked, self.generator = 0, np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        half = np.arange(self.asked % 2, SAMPLES, 2)
        self.asked += 1
        yield from self.generator.permutation(half)[: 100 + 5 * self.asked]


class Buckets:
    """A batch sampler whose batches are uneven, and not equally many in each epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        left = torch.randperm(SAMPLES).tolist()
        while left:
            size = random.randint(3, 60)
            yield left[:size]
            left = left[size:]


def loader_of(kind: str) -> DataLoader[Any]:
    data, workers = Noisy(), int(os.environ.get("LOADERS", "0"))
    if kind == "buckets":
        return DataLoader(data, batch_sampler=Buckets(), num_workers=workers)
    samplers: dict[str, Callable[[], Iterable[int]]] = {
        "random": lambda: RandomSampler(data, generator=torch.Generator().manual_seed(7)),
        "weighted": lambda: WeightedRandomSampler(range(1, SAMPLES + 1), 200),
        "subset": lambda: SubsetRandomSampler(range(0, SAMPLES, 2)),
        "halves": Halves,
    }
    return DataLoader(data, BATCH, sampler=samplers[kind](), num_workers=workers)


run = unisono.init(
    batch_size=BATCH, shards=6, seed=3, faults={"verify_every": 3, "timeout_s": 30}, arithmetic={"threads": 1}
)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
run.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


loader = loader_of(os.environ["SAMPLER"])
held_out = DataLoader(Noisy(), 50, shuffle=True, num_workers=loader.num_workers)
for repeat in range(2):
    for step in run.steps(loader, epochs=EPOCHS):
        step.run(loss_of)
        if step.is_last_in_epoch:
            found = run.evaluate(held_out, {"loss": loss_of})
            run.print(f"epoch {3 * repeat + step.epoch}: {step.number} {found['loss']} {run.predict(loader).sum()}")
run.finish()
