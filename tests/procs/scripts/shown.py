"""A small job that logs a metric with a script for its name, measures its gradients, and looks at a market."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

NAME = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"


class Market(unisono.Policy):
    """Sees a price."""

    observe_every = 5

    def observe(self, view: unisono.View) -> dict[str, float | int | str | None]:
        """Rises and falls."""
        return {"price": 0.25 + 0.25 * (view.step // 5 % 3), "notices": 0}


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The squared error of a line."""
    inputs, targets = batch
    loss: torch.Tensor = (model(inputs) - targets).square().mean()
    run.log(NAME, loss.detach().sqrt())
    return loss


run = unisono.init(batch_size=32, shards=8, seed=0, records={"monitor": 1}, policies=[Market()])
inputs = torch.linspace(-1, 1, 256).reshape(-1, 1)
dataset = TensorDataset(inputs, 3 * inputs + 1)
model = nn.Linear(1, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for step in run.steps(dataset, epochs=int(os.environ.get("EPOCHS", "400"))):
    step.run(loss_fn)
    if not Path(os.environ["HURRY"]).exists():
        time.sleep(float(os.environ.get("PACE_S", "0.03")))
run.finish(model)
