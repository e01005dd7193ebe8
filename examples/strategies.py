"""Handwritten digits, and another way to synchronise with another number of workers.

    unisono run -n 2 examples/strategies.py                       local SGD: two workers average every fourth step
    unisono run -n 1:4 examples/strategies.py                     with unisono resize, it changes while it trains
    unisono run -n 2 --strategy pair-averaging examples/strategies.py --fixed

One worker has nobody to synchronise with: all-reduce, the default, is then the plain loop.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono
import unisono_lab

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--fixed", action="store_true", help="no policy: --strategy says how, all the time")
args = parser.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
training, held_out = TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])

# Two or three workers average every fourth step; from four on, whoever is done takes the next batch.
by_workers = {1: "all-reduce", 2: unisono.LocalSGD(every=4), 4: unisono_lab.ParameterServer(synchronous=False)}
policies = [] if args.fixed else [unisono.StrategyPolicy(workers=by_workers)]
run = unisono.init(batch_size=64, shards=4, seed=0, policies=policies)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
model, optimizer = run.prepare(model, optimizer)


def loss_of(model, batch):
    images, digit = batch
    return F.cross_entropy(model(images), digit)


def metrics(model, batch):
    images, digit = batch
    return {"accuracy": (model(images).argmax(1) == digit).float().mean()}


for step in run.steps(training, epochs=args.epochs):
    step.run(loss_of)  # under another strategy than all-reduce, the loss of this worker alone
    if step.is_last_in_epoch:
        accuracy = run.evaluate(held_out, metrics)["accuracy"]  # all synchronise, and have the same weights here
        run.print(f"epoch {step.epoch + 1}: {run.strategy} among {run.world_size}, accuracy {accuracy:.2%}")
run.finish(model)
