"""Handwritten digits with the batch and the number of workers that bring training forward fastest.

    unisono run -n 1:4 examples/goodput.py

What was decided, and why, is in the run folder: `grep decided runs/*/journal.jsonl`.
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
options = parser.parse_args()

# A batch of more than 512 samples is not tried. After each change 20 steps are timed before the next one.
policies = [unisono.GoodputPolicy(largest=512)]
run = unisono.init(batch_size=64, shards=4, seed=0, policies=policies)

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
        run.print(f"epoch {step.epoch + 1}: batch {step.size} on {run.world_size} workers, loss {float(loss):.3f}")
run.finish(model)
