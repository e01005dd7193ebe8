"""A small training that takes its time until a file is there."""

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono

PACE_S = float(os.environ.get("PACE_S", "0"))
HURRY = Path(os.environ.get("HURRY", "hurry"))
EPOCHS = int(os.environ.get("EPOCHS", "4"))

if os.environ.get("UNCOLLECTED"):
    gc.disable()

run = unisono.init(batch_size=28, shards=7, seed=0)
inputs = torch.randn(280, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1))
model: Any = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = (model(batch[0]).squeeze(1) - batch[1]).square().mean()
    return loss


for step in run.steps(data, epochs=EPOCHS):
    step.run(loss_of)
    time.sleep(0 if HURRY.exists() else PACE_S)
run.finish(model)
