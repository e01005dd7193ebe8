"""Trains what no module of the run holds: the centres of a loss, a temperature with an optimizer of its own, and more.

argv: the model's optimizer. What is trained is drawn in each process, as scripts do.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono

run = unisono.init(batch_size=16, seed=0, shards=8)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
centres, temperature = nn.Parameter(torch.randn(3, 3)), torch.zeros((), requires_grad=True)
frozen = torch.randn(3)
optimizer = getattr(torch.optim, sys.argv[1])(
    [{"params": [*model.parameters(), centres]}, {"params": [frozen]}], lr=0.05
)
run.prepare(model, [optimizer, torch.optim.SGD([temperature], lr=0.1, momentum=0.9)])


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    cosine = F.normalize(model(batch[0]) + frozen) @ F.normalize(centres).T
    return F.cross_entropy(cosine * temperature.exp(), batch[1])


inputs = torch.linspace(0, 99, 240).sin().view(60, 4)
for step in run.steps(TensorDataset(inputs, inputs.argmax(1) % 3), epochs=2):
    step.run(loss_fn)
run.print("after", temperature.item(), centres.tolist(), frozen.tolist())
run.finish(model)
