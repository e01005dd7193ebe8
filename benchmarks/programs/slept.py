"""Trains with a computation that takes as long as it is told: what is slow and what is not is known then.

Started by ``unisono run -m benchmarks.programs.slept SHARDS MILLISECONDS STEPS``.
"""

import sys
import time

import torch
from torch import Tensor, nn

import unisono

shards, shard_ms, steps = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])


def loss_of(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Takes its time."""
    time.sleep(shard_ms / 1000)
    loss: Tensor = model(batch[0]).square().mean()
    return loss


run = unisono.init(batch_size=4 * shards, shards=shards, seed=0)
model = nn.Linear(8, 8)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(torch.utils.data.TensorDataset(torch.randn(4 * shards * steps, 8)), epochs=1):
    step.run(loss_of)
run.finish()
