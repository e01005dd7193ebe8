"""Loops that evaluate with a model in training mode, whose layers count batches; with an optimizer and without."""

import torch
import torch.nn.functional as F
from accelerate import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

INPUTS = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
LABELS = INPUTS[:, :3].argmax(1)

by_seed = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
accelerator = unisono.accelerate.Accelerator(shards=6, dataloader_config=by_seed)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
loader = DataLoader(TensorDataset(INPUTS[:48], LABELS[:48]), 12, shuffle=True)
evaluation = DataLoader(TensorDataset(INPUTS[48:], LABELS[48:]), 4)
model, loader, evaluation = accelerator.prepare(model, loader, evaluation)


def evaluated() -> list[float]:
    found = [accelerator.gather_for_metrics(model(inputs).sum(1).detach()) for inputs, _ in evaluation]
    return [round(float(value), 5) for value in torch.cat(found)]


first = evaluated()
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
ends = list[int]()
for _ in range(2):
    for inputs, labels in loader:
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.sync_gradients and accelerator.gradient_state.end_of_dataloader:
            ends.append(accelerator.steps_done)
    with torch.no_grad():
        last = evaluated()
accelerator.run.print(f"after {ends} {first} {last}")
accelerator.run.finish()
