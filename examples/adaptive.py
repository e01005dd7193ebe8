"""Handwritten digits with a batch that follows the gradients' noise, and workers that follow the batch.

Run it on any number of workers, or on a number that changes: the decisions and the weights are the same.

    unisono run -n 1:4 examples/adaptive.py --epochs 20
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


class MoreWorkersForLargerBatches(unisono.Policy):
    """One worker for each 64 samples of a batch."""

    def __init__(self):
        self.asked_for = 1  # goes over to workers that join, and into checkpoints

    def after_step(self, view: unisono.View) -> None:
        """Ask for as many as the batch calls for, if that is news."""
        wanted = max(1, min(4, view.batch_size // 64))
        if wanted != self.asked_for:
            self.asked_for = wanted
            self.resize(wanted, batch_size=view.batch_size)


# A policy sees the training after each step, and what it decides holds from the next step on.
policies = [unisono.NoiseScalePolicy(largest=512, every=20, ramp=10), MoreWorkersForLargerBatches()]
run = unisono.init(batch_size=64, shards=8, seed=0, policies=policies)

digits = load_digits()
inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = TensorDataset(inputs[300:], labels[300:]), TensorDataset(inputs[:300], labels[:300])

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)


def loss_of(model, batch):
    images, digit = batch
    return F.cross_entropy(model(images), digit)


def metrics(model, batch):
    images, digit = batch
    return {"accuracy": (model(images).argmax(1) == digit).float().mean()}


for step in run.steps(train, epochs=options.epochs):
    step.run(loss_of)
    if step.is_last_in_epoch:
        accuracy = run.evaluate(test, metrics)["accuracy"]
        scale = run.metrics.get("noise_scale")
        run.print(f"epoch {step.epoch + 1}: batch {step.size}, noise scale {scale}, accuracy {accuracy:.3f}")
run.finish(model)
