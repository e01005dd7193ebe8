"""Trains in float16 on samples of which a few make gradients overflow at the loss scale that suits the others.

Arguments: how the script trains.
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono

LARGE = 77
"""The sample whose gradient overflows: of step 4 in each epoch of 6 steps."""
[way] = sys.argv[1:]


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


arithmetic = unisono.Arithmetic(precision="fp16", compression="bf16" if way == "compressed" else "none")
run = unisono.init(batch_size=16, seed=0, shards=1 if way == "whole" else 6, arithmetic=arithmetic)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
generator = torch.Generator().manual_seed(0)
inputs, labels = torch.randn(96, 6, generator=generator), torch.randint(0, 3, (96,), generator=generator)
inputs[LARGE] *= 3e4
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.prepare(model, optimizer)
for step in run.steps(TensorDataset(inputs, labels), epochs=4, shuffle=False):
    before = unisono.digest(model[0])
    step.run(loss_fn, update=optimizer.step if way == "own" else None, clip_norm=1.0 if way == "clipped" else None)
    assert math.isfinite(step.loss)
    is_updated = before != unisono.digest(model[0])
    assert is_updated != step.is_skipped
    run.print(f"epoch {step.epoch}: step {step.number} {is_updated=} scale {run.inside.trained.loss_scale.value:g}")
run.finish()
