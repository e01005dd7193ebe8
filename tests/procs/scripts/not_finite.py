"""Trains on samples of which one has a finite loss and a gradient that is not: the slope of a root at zero.

Arguments: what the run does then, and how the script trains.
"""

import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import NonFiniteLoss

ODD = 77
"""The sample: of step 4 in each epoch of 6 steps, in shard 3 of 4."""
SPOILED = 7
"""The step from which on an update of the script's own makes weights that are NaN, if it is to."""
on_nan: Any
on_nan, way = sys.argv[1:]


class Rooted(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + 0.01 * hidden.pow(2).sum(1, keepdim=True).sqrt()


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


arithmetic = {"on_nan": on_nan, "compression": "bf16" if way == "compressed" else "none"}
strategy = way if ":" in way else None
run = unisono.init(batch_size=16, seed=0, shards=1 if way == "whole" else 4, arithmetic=arithmetic, strategy=strategy)
model: Any = nn.Sequential(OrderedDict(body=nn.Linear(6, 5, bias=False), out=Rooted(5, 3)))
parts = [model.body, model.out]
if way == "slices":
    for part in parts:
        run.fully_shard(part)
if way == "stages":
    model = run.pipeline(model, ["out"])
generator = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(96, 6, generator=generator), torch.randint(0, 3, (96,), generator=generator)
inputs[ODD] = 0.0
optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]
run.prepare(model, optimizers)
try:
    for step in run.steps(TensorDataset(inputs, labels), epochs=2, shuffle=False):
        before = unisono.digest(model)

        def update(number: int = step.number) -> None:
            for one in optimizers:
                one.step()
            if way == "spoiled" and number >= SPOILED:
                torch.nn.init.constant_(model.out.bias, torch.nan)

        loss = step.run(
            loss_fn, update=update if way in ("own", "spoiled") else None, clip_norm=1.0 if way == "clipped" else None
        )
        is_finite = all(bool(each.isfinite().all()) for each in model.parameters() if not each.is_meta)
        changed = before != unisono.digest(model)
        run.print(f"epoch {step.epoch}: step {step.number} loss {loss:.6f} {is_finite=} {changed=}")
except NonFiniteLoss as error:
    run.print(f"after {unisono.digest(model) == before} {error}")
else:
    run.print(f"after {run.finish()}")
