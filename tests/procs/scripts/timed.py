"""A training whose times are known, since its loss sleeps, and a policy that goes by them."""

import json
import os
import time
from typing import Any

import torch
from torch import nn

import unisono

SHARD_S = 0.04
calls = 0


class Enough(unisono.Policy):
    """Ends the loop once the policy has come to where it is expected."""

    def __init__(self, workers: int, batch_size: int, after: int = 0) -> None:
        self._goal, self._after = (workers, batch_size), after

    def after_step(self, view: unisono.View) -> None:
        if (view.world_size, view.batch_size) == self._goal and view.steady >= 9 and view.step > self._after:
            self.stop()


class Recorded(unisono.Policy):
    """Decides what another run's policy decided."""

    def after_step(self, view: unisono.View) -> None:
        for step, verb, value in json.loads(os.environ["DECIDED"]):
            if step == view.step:
                getattr(self, verb)(*([] if value is None else [value]))


def market() -> dict[str, float]:
    global calls  # noqa: PLW0603
    calls += 1
    return {"price": 0.1, "notices": 1 if 10 <= calls < 40 else 0}


def chosen() -> list[unisono.Policy]:
    match os.environ["POLICY"]:
        case "goodput":
            return [unisono.GoodputPolicy(largest=64, patience=6, ramp=3), Enough(4, 64)]
        case "spot":
            return [unisono.SpotPolicy(market, budget=0.25, every=1), Enough(2, 32, after=45)]
    return [Recorded()]


def loss_of(model: nn.Module, batch: Any) -> Any:
    time.sleep(0.0 if os.environ["POLICY"] == "recorded" else SHARD_S)
    inputs, targets = batch
    return (model(inputs).squeeze(1) - targets).square().mean()


run = unisono.init(batch_size=32, shards=4, seed=4, policies=chosen(), records={"monitor": 1})
draw = torch.Generator().manual_seed(2)
inputs = torch.randn(4096, 4, generator=draw)
targets = inputs.sum(1) + 6 * torch.randn(4096, generator=draw)
torch.manual_seed(0)
model = nn.Linear(4, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
for step in run.steps(torch.utils.data.TensorDataset(inputs, targets), epochs=6):
    step.run(loss_of)
run.finish()
