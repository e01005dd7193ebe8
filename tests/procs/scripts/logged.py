"""A training with figures of its own, whose result depends on Python's random numbers: who draws some is found."""

import os
import random
from typing import Any

import torch
from torch import nn

import unisono

run = unisono.init(batch_size=28, shards=7, seed=0, checkpoints={"every": int(os.environ.get("EVERY", "0")) or None})
inputs = torch.randn(140, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1))
model: Any = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = (model(batch[0]).squeeze(1) - batch[1]).square().mean()
    run.log("a name: with/odd, signs", loss.detach() / 2)
    return loss * (1 + random.random() / 10)


for step in run.steps(data, epochs=4):
    if step.number % 3 == 0:
        run.log("beside", step.number / 2)
    step.run(loss_of)
    if step.is_last_in_epoch:
        run.log("of the epoch", float(step.epoch))
run.log("at the end", 1.5)
run.finish(model)
