"""A small convolutional network on random images, whose memory is for its activations."""

import torch
import torch.nn.functional as F
from torch import nn

import unisono

run = unisono.init(batch_size=32, shards=2)
draw = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(8192, 3, 32, 32, generator=draw), torch.arange(8192) % 10)
model = nn.Sequential(
    *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    *(nn.Flatten(), nn.Linear(16, 10)),
)
model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3))
for step in run.steps(data, epochs=1000):
    step.run(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
run.finish(model)
