"""Loops and evaluations on a stream that makes its batches itself, of different sizes, and smaller than the shards."""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono

SIZES = [16, 16, 9, 20, 3, 16]


class Batches:
    """Another order in each pass."""

    name, cure = "the batches", "seed what they draw"

    def __init__(self) -> None:
        self.origin = self

    def open_batches(self, number: int) -> Iterator[Any]:
        own = torch.Generator().manual_seed(number)
        if "UNSEEDED" in os.environ:
            own.seed()
        order = torch.randperm(sum(SIZES), generator=own)
        for rows in order.split(SIZES):
            yield {"x": torch.sin(rows[:, None] * torch.arange(1.0, 7.0)), "number": rows}


run = unisono.init(batch_size=16, shards=8, seed=1, checkpoints={"every": 3})
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 3))
run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["number"] % 3)


batches = Batches()
for epochs in (3, 2):
    for step in run.steps(batches, epochs):
        step.run(loss_fn)
        run.print(f"after step {step.number}:", step.size, step.epoch, step.is_last_in_epoch)
    print("after loop:", run.evaluate(batches, {"numbers": lambda _, batch: batch["number"].float().mean()}))
found = run.predict(batches, lambda model, batch: {"out": model(batch["x"]), "number": batch["number"]})
print("after predict:", found["number"].tolist(), float(found["out"].sum()))
run.finish()
