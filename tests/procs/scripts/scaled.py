"""A small training for studies of how it scales; fails with as many workers as it is told."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import unisono

arguments = argparse.ArgumentParser()
arguments.add_argument("--fails-with", type=int, default=0)
options = arguments.parse_args()

run = unisono.init(batch_size=32, shards=4, run_dir="own", checkpoints={"every": 2})
if run.world_size == options.fails_with:
    raise RuntimeError(f"there are {run.world_size} of us")
draw = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(128, 16, generator=draw), torch.arange(128) % 4)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(50):  # more than any study waits for
    for step in run.steps(data):
        step.run(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
run.finish(model)
