"""Handwritten digits on machines whose price changes, and that may be taken away.

    unisono run -n 1:4 examples/spot.py --market market.json

While it trains put {"price": 0.5, "notices": 0} into market.json, then another price, then a notice. In earnest a small
program of yours writes that file from your provider's prices and notices: into another one first, which it renames.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--market", type=Path, default=Path("market.json"))
parser.add_argument("--budget", type=float, default=1.0)
options = parser.parse_args()


def market():
    """What a worker costs in an hour, and how many are about to be taken."""
    return json.loads(options.market.read_text())  # without a file nothing changes: that is an OSError


policies = [unisono.SpotPolicy(market, budget=options.budget)]
run = unisono.init(batch_size=256, shards=4, seed=0, policies=policies)

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
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
