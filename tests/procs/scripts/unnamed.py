"""Keeps state beside the model, of the kind that KIND names."""

import os

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import unisono

KIND = os.environ["KIND"]
INPUTS = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 3, (96,), generator=torch.Generator().manual_seed(2))
run = unisono.init(batch_size=24, shards=6, seed=1)


class Curriculum(Dataset[tuple[Tensor, Tensor]]):
    """Gets harder with the epoch that the loop tells it."""

    epoch = 0

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index] * (1 - 0.2 * self.epoch), LABELS[index]


class Net(nn.Module):
    """Knows things that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.place, self.is_first, self.shift = run.rank, run.rank == 0, 0.1 if KIND == "alike" else 0.1 * run.rank

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(x)
        return result


weight = 1.0


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Goes by a global variable that the loop sets."""
    return weight * nn.functional.cross_entropy(model(batch[0]), batch[1])


data, model = Curriculum(), Net()
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(data, epochs=4):
    if KIND == "set":
        weight = 1 / (1 + step.epoch)
    step.run(loss_fn)
    if step.is_last_in_epoch:
        if KIND == "epoch":
            data.epoch = step.epoch + 1
        if KIND == "weight":
            weight = 1 / (2 + step.epoch)
run.finish(model)
