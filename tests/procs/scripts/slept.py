"""A training whose shards take as long to compute as they are told, under a policy against slow workers."""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

import unisono

run = unisono.init(batch_size=32, shards=8, seed=4, policies=[unisono.StragglerPolicy(patience=4)])
torch.manual_seed(0)
model = nn.Linear(12, 4)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
data = torch.utils.data.TensorDataset(torch.randn(640, 12, generator=torch.Generator().manual_seed(2)))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    time.sleep(float(os.environ.get("PACE_S", "0")))
    loss: Tensor = model(batch[0]).square().mean()
    return loss


for step in run.steps(data, epochs=8):
    step.run(loss_of)
run.finish()
