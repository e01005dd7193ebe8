"""A script whose rate follows the losses of its own shards: those of the last one are large in one step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono

generator = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator)
inputs[22:24] *= 100
losses: list[float] = []


def loss_fn(model: Any, batch: Any) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    losses.append(loss.item())
    return loss


run = unisono.init(batch_size=8, seed=0, shards=4)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer)
for step in run.steps(TensorDataset(inputs, labels), epochs=1, shuffle=False):
    step.run(loss_fn)
    optimizer.param_groups[0]["lr"] = 0.01 if max(losses) > 10 else 0.1
    losses.clear()
run.print(f"after {run.finish()}")
