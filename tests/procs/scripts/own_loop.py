"""A loop as it is written without the library, begun with it: with ``prepare`` after the first line, or without."""

import sys

import torch
from torch import nn

import unisono

run = unisono.init(batch_size=8, shards=4)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "prepare" in sys.argv:
    run.prepare(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.full((1, 2), run.rank + 1.0)).sum().backward()
    optimizer.step()
