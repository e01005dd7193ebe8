"""Handwritten digits on workers of which one becomes slow, and a policy that does something about it.

    unisono run -n 3 --max-restarts 3 --faults slow.toml examples/slow_worker.py

where ``slow.toml`` is a fault plan: the second worker takes eight times as long from step 20 on.

    [[fault]]
    kind = "slow"
    rank = 1
    at_step = 20
    factor = 8

First the worker gets fewer shards; since it is too slow even for one, it is replaced. Between hosts, the second policy
looks after the connections in the same way. The weights stay what they are without all that. What was decided, and
why, is in the journal: ``unisono replay`` and the run folder show it.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--shard-ms", type=float, default=20.0, help="that a shard takes at least, so that there is a wait")
options = parser.parse_args()

policies = [unisono.StragglerPolicy(patience=5), unisono.TopologyPolicy()]
run = unisono.init(batch_size=128, shards=8, seed=0, policies=policies)

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)


def loss_of(model, batch):
    images, digit = batch
    time.sleep(options.shard_ms / 1000)
    return F.cross_entropy(model(images), digit)


for step in run.steps(data, epochs=options.epochs):
    loss = step.run(loss_of)
    if step.is_last_in_epoch:
        run.print(f"epoch {step.epoch + 1}: {run.metrics['samples_per_s']:.0f} samples/s, loss {float(loss):.3f}")
run.finish(model)
