"""A training with a progress bar, whose main worker is killed once, and whose workers all print.

In its last epoch it waits until somebody has seen the bar: of several bars that come at once only the last is drawn.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono

run = unisono.init(batch_size=28, shards=7, seed=0)
inputs = torch.randn(280, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1))
model: Any = nn.Linear(8, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
killed, seen = Path(run.dir) / "killed", Path(run.dir) / "seen"
for step in run.progress(run.steps(data, epochs=3)):
    step.run(lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square().mean())
    if step.number % 5 == 0:
        print(f"worker {run.rank} at step {step.number}", flush=True)
    if step.number == 12 and run.rank == 0 and not killed.exists():
        killed.touch()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if step.number == 21:
        time.sleep(0.3)  # a bar is drawn after a quarter of a second
    while step.number == 22 and not seen.exists():
        time.sleep(0.02)
    time.sleep(0.05)
run.finish(model)
