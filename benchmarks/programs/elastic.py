"""Trains until it is stopped, and notes when each step was committed: what benchmarks of elastic jobs watch.

Started by ``unisono run -m benchmarks.programs.elastic WORKLOAD SHARDS [sgd|adam|muon|whole-muon] [BATCH] [STEPS]``.
"""

import os
import sys
import time
from pathlib import Path

import torch

import unisono
from benchmarks.workloads import BATCHES, WORKLOADS
from unisono.adapt.norms import Monitoring

ENDLESS = 10**6


class Undeclared(torch.optim.Muon):
    """Whose matrices have no owners, since nobody has said that they may: every worker updates all of them."""


workload = WORKLOADS[sys.argv[1]]
batch_size = int(sys.argv[4]) if len(sys.argv) > 4 else workload.batch_size
epochs = int(sys.argv[5]) // BATCHES if len(sys.argv) > 5 else ENDLESS
one_in = os.environ.get("BENCHMARK_ONE_IN")
monitor = Monitoring(every=1, one_in=int(one_in)) if one_in else 0
run = unisono.init(batch_size=batch_size, shards=int(sys.argv[2]), seed=0, records={"monitor": monitor})
model = workload.build()
weights = model.parameters()
match sys.argv[3] if len(sys.argv) > 3 else "sgd":
    case "adam":
        run.prepare(model, torch.optim.Adam(weights, lr=1e-4))
    case "muon" | "whole-muon" as form:
        listed = list(weights)
        muon = (torch.optim.Muon if form == "muon" else Undeclared)([one for one in listed if one.ndim == 2], lr=1e-3)
        run.prepare(model, [muon, torch.optim.AdamW([one for one in listed if one.ndim != 2], lr=1e-4)])
    case _:
        run.prepare(model, torch.optim.SGD(weights, lr=1e-3, momentum=0.9))
name = os.environ.get("UNISONO_WORKER") or run.rank
commits = Path(run.dir) / f"commits-{name}.txt"
with commits.open("w", buffering=1) as file:
    for step in run.steps(workload.data(batch_size * BATCHES), epochs=epochs, shuffle=False):
        step.run(workload.loss)
        file.write(f"{step.number} {time.time()}\n")
run.finish()
