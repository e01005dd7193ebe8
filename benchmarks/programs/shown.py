"""Trains digits as fast as one can watch it: what the pictures of the page show.

Started by ``unisono run -m benchmarks.programs.shown``.
"""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono

PAUSE_S = 0.01


class Market(unisono.Policy):
    """Sees a price that rises and falls, and lets the learning rate fall."""

    observe_every = 50

    def observe(self, view: unisono.View) -> dict[str, float | int | str | None]:
        """A machine's price for an hour."""
        return {"price": round(0.3 + 0.1 * ((view.step // 50 * 7) % 5), 2)}

    def after_step(self, view: unisono.View) -> None:
        """Every 400 steps."""
        if view.step and view.step % 400 == 0:
            self.set_learning_rate(view.learning_rate * 0.6, loss=float(view.metrics["loss"]))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of one shard."""
    images, digits = batch
    found = model(images)
    run.log("accuracy", (found.argmax(1) == digits).float().mean())
    return F.cross_entropy(found, digits)


run = unisono.init(
    batch_size=128, shards=16, seed=0, records={"monitor": 2}, policies=[Market()], checkpoints={"every": 250}
)
loaded = load_digits()
data = TensorDataset(torch.tensor(loaded.data, dtype=torch.float32) / 16, torch.tensor(loaded.target))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 10))
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
for step in run.steps(data, epochs=10**6, drop_last=True):
    step.run(loss_of)
    time.sleep(PAUSE_S)
