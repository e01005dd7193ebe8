"""Handwritten digits on as many workers as pay for themselves.

    unisono run -n 1:4 examples/scaling.py --price 0.3

A network as small as this one does not gain much from a second worker: see what `--width 4096` changes.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--price", type=float, default=0.3)
parser.add_argument("--width", type=int, default=256)
options = parser.parse_args()

# A worker's hour costs 0.3 of what it is worth that the training ends an hour earlier.
run = unisono.init(batch_size=256, shards=4, seed=0, policies=[unisono.ScalingPolicy(price=options.price)])

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
model = nn.Sequential(nn.Linear(64, options.width), nn.ReLU(), nn.Linear(options.width, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)


def loss_of(model, batch):
    images, digit = batch
    return F.cross_entropy(model(images), digit)


for step in run.steps(data, epochs=options.epochs):
    loss = step.run(loss_of)
    if step.is_last_in_epoch:
        run.print(f"epoch {step.epoch + 1}: {run.world_size} workers, loss {float(loss):.3f}")
run.finish(model)
