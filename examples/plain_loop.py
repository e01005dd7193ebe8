"""The same training twice: an ordinary PyTorch loop, and what changes when Unisono runs it.

    python examples/plain_loop.py --which plain
    python examples/plain_loop.py --which unisono
    unisono run -n 3 examples/plain_loop.py --which unisono      the same weights, to the last bit

Read the two functions side by side. The lines that change are marked. What the plain loop prints for each epoch is
what a scaling study reads of a loop to compare with:

    unisono study examples/plain_loop.py --baseline "examples/plain_loop.py --which plain" -- --which unisono
"""

import argparse
import json
from time import perf_counter

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

EPOCHS, BATCH_SIZE = 5, 100


def load():
    digits = load_digits()
    return TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))


def plain():
    torch.manual_seed(0)
    dataset = load()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    for epoch in range(EPOCHS):
        begun = perf_counter()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds = perf_counter() - begun
        print(json.dumps({"epoch": epoch, "seconds": seconds, "samples": len(dataset), "loss": loss.item()}))


def with_unisono():
    run = unisono.init(batch_size=BATCH_SIZE, seed=0)  # was: torch.manual_seed
    dataset = load()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)  # new: the same weights on every worker
    for epoch in run.epochs(EPOCHS, loader):  # was: range. A run that resumes begins where it was
        for images, labels in loader:  # once for each shard of this worker
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # behind the last shard, with the mean gradient of all workers
        run.print(f"epoch {epoch}: loss {run.mean_loss:.4f}")  # was: print. Once, not once per worker

    run.finish(model)  # new: the result, and the weights' sha256


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--which", choices=["plain", "unisono"], required=True)
    {"plain": plain, "unisono": with_unisono}[arguments.parse_args().which]()
