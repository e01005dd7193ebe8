"""Handwritten digits with eight times the batch, and a learning rate that AdaScale makes as large as the noise allows.

The rate below was made for batches of 16. With 128 samples a step is worth between 1 and 8 steps of 16: AdaScale
measures how many, multiplies the rate by that, and ends when 900 steps of 16 are made up for.

    unisono run -n 2 examples/ada_scale.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--iterations", type=int, default=900, help="with batches of 16")
options = parser.parse_args()


def half_cosine(tau):
    """The schedule, in steps of 16 samples: a rate that falls to nothing."""
    return 0.5 * (1 + math.cos(math.pi * min(1, tau / options.iterations))) + 1e-6


ada_scale = unisono.AdaScale(base=16, schedule=half_cosine, until=options.iterations)
run = unisono.init(batch_size=128, shards=8, seed=0, policies=[ada_scale])

digits = load_digits()
inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = TensorDataset(inputs[300:], labels[300:]), TensorDataset(inputs[:300], labels[:300])

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)


def loss_of(model, batch):
    images, digit = batch
    return F.cross_entropy(model(images), digit)


def metrics(model, batch):
    images, digit = batch
    return {"accuracy": (model(images).argmax(1) == digit).float().mean()}


for step in run.steps(train, epochs=100):  # more than it takes
    step.run(loss_of)
    if step.is_last_in_epoch:
        run.print(
            f"epoch {step.epoch + 1}: a step is worth {ada_scale.gain:.1f}, {ada_scale.tau:.0f} iterations so far"
        )
accuracy = run.evaluate(test, metrics)["accuracy"]
run.print(f"{step.number + 1} steps for {ada_scale.tau:.0f} iterations: accuracy {accuracy:.3f}")
run.finish(model)
