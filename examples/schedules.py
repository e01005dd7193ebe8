"""Handwritten digits with a batch that grows by a schedule instead of a learning rate that falls.

    unisono run -n 2 examples/schedules.py

The rate is warmed up to four times its value over the first two epochs, then the batch is doubled three times.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=16)
epochs = parser.parse_args().epochs

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))

warm_up = unisono.LinearScaling(factor=4, samples=2 * len(data))
growth = unisono.BatchSizeSchedule({epochs // 2: 2, 5 * epochs // 8: 2, 3 * epochs // 4: 2})
run = unisono.init(batch_size=64, shards=4, seed=0, policies=[warm_up, growth])

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)


def loss_of(model, batch):
    images, digit = batch
    return F.cross_entropy(model(images), digit)


for step in run.steps(data, epochs=epochs):
    loss = step.run(loss_of)
    if step.is_last_in_epoch:
        run.print(f"epoch {step.epoch + 1}: batch {run.metrics['batch_size']}, loss {float(loss):.3f}")
run.finish(model)
