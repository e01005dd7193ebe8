"""Trains until it is stopped, and notes when each step was committed: what `benchmarks recovery` watches.

Started by ``unisono run -m benchmarks.programs.elastic WORKLOAD SHARDS``.
"""

import os
import sys
import time
from pathlib import Path

import torch

import unisono
from benchmarks.workloads import BATCHES, WORKLOADS

ENDLESS = 10**6

workload = WORKLOADS[sys.argv[1]]
run = unisono.init(batch_size=workload.batch_size, shards=int(sys.argv[2]), seed=0)
model = workload.build()
run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
commits = Path(run.dir) / f"commits-{os.environ['UNISONO_WORKER']}.txt"
with commits.open("w", buffering=1) as file:
    for step in run.steps(workload.data(workload.batch_size * BATCHES), epochs=ENDLESS, shuffle=False):
        step.run(workload.loss)
        file.write(f"{step.number} {time.time()}\n")
