"""A short training, and lines after its end in which the worker of a rank does not get to the last.

Arguments: the rank, and ``kill``, ``raise`` or ``wait`` (until a file ``go`` is in the run folder);
or ``obstruct``: it leaves no place for the job's result;
with ``room at last``, only until its last line; with ``room too late``, until nothing of its script is left.
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono

run = unisono.init(batch_size=8, shards=4, seed=1)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer)
data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)
for step in run.steps(data, epochs=2):
    step.run(lambda model, batch: model(batch[0]).square().mean())
rank, folder = run.rank, run.dir
is_victim, how = rank == int(sys.argv[1]), sys.argv[2]
result = Path(folder, "result.json")
if is_victim and how in ("obstruct", "room at last", "room too late"):
    result.mkdir()
if is_victim and how == "room too late":
    atexit.register(result.rmdir)
run.finish()

if is_victim and how == "room at last":
    result.rmdir()
elif is_victim and how in ("raise", "kill"):
    if how == "raise":
        raise ValueError("no such bucket")
    os.kill(os.getpid(), signal.SIGKILL)
elif is_victim and how == "wait":
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    print("these are the last words")
Path(folder, f"exported-{rank}").touch()
