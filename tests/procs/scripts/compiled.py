"""Trains a compiled model on batches of two sizes; which a worker meets first depends on its shards."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

drawn = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(54, 16, generator=drawn), torch.randint(0, 10, (54,), generator=drawn))
batches = [list(range(22)), list(range(22, 54))]

run = unisono.init(batch_size=32, seed=0, shards=4)
model = nn.Sequential(nn.Linear(16, 33), nn.BatchNorm1d(33), nn.GELU(), nn.Linear(33, 10))
run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
compiled = torch.compile(model)
for step in run.steps(DataLoader(data, batch_sampler=batches), epochs=2):
    step.run(lambda model, batch: nn.functional.cross_entropy(compiled(batch[0]), batch[1]))
run.finish(model)
