"""A small training whose memory is for its activations; fails in other ways when it is told to."""

import argparse
import os
import signal

import torch
from torch import Tensor, nn

import unisono

arguments = argparse.ArgumentParser()
arguments.add_argument("--shards", type=int, default=2)
arguments.add_argument("--raises-above", type=int, default=0, help="samples in a shard for which torch finds no memory")
arguments.add_argument("--killed-above", type=int, default=0, help="for which the kernel ends rank 1, or the only one")
arguments.add_argument("--breaks-above", type=int, default=0, help="for which the script is wrong")
options = arguments.parse_args()

SAMPLES, WIDTH, LAYERS = 20_000, 2048, 8

run = unisono.init(batch_size=32, shards=options.shards, run_dir="own")
data = torch.utils.data.TensorDataset(torch.arange(SAMPLES).float().reshape(-1, 1) / SAMPLES)


class Hungry(nn.Module):
    """Keeps 64 KiB of activations for each sample, and computes next to nothing with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, WIDTH)

    def forward(self, samples: Tensor) -> Tensor:
        values: Tensor = self.first(samples)
        for _ in range(LAYERS):
            values = torch.sigmoid(values)
        return values.mean()


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    count = len(batch[0])
    if 0 < options.raises_above < count:
        torch.empty(10**15)
    if 0 < options.killed_above < count and run.rank == run.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if 0 < options.breaks_above < count:
        raise ValueError(f"{count} samples in a shard are too many")
    loss: Tensor = model(batch[0])
    return loss


model, optimizer = run.prepare(model := Hungry(), torch.optim.Adam(model.parameters(), lr=1e-3))
for step in run.steps(data, epochs=1000):
    step.run(loss_of)
run.finish(model)
