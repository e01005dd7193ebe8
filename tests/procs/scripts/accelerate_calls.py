"""Processes of accelerate call each other by its functions; a stream has a reader that ends before the others."""

import os

import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list, gather, gather_object
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import unisono
from unisono.errors import JobError

INPUTS = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
LABELS = INPUTS[:, :3].argmax(1)


class Uneven(IterableDataset):  # type: ignore[type-arg]
    """All readers but the last one have few samples."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        worker = get_worker_info()
        reader, readers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for place in range(60 * reader // readers, 60 * (reader + 1) // readers):
            if reader == readers - 1 or place % 5 == 0:
                yield INPUTS[place], LABELS[place]


accelerator = unisono.accelerate.Accelerator(shards=6)
torch.manual_seed(0)
rank = max(accelerator.run.rank, 0)
agreed = broadcast_object_list([rank, f"worker {rank}"])
together = gather(torch.tensor([rank, 7]))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
parts = model, optimizer, DataLoader(Uneven(), 12), DataLoader(TensorDataset(INPUTS[:17], LABELS[:17]), 4)
model, optimizer, loader, evaluation = accelerator.prepare(*parts)
model.train()
for inputs, labels in loader:
    accelerator.backward(F.cross_entropy(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
model.eval()
answers, texts = list[int](), list[str]()
for inputs, labels in evaluation:
    with torch.no_grad():
        outputs = model(inputs)
    answers += accelerator.gather_for_metrics(outputs.argmax(1)).tolist()
    texts += gather_object([f"label {int(label)}" for label in labels])
if os.environ.get("REFUSED"):
    model.train()
    for inputs, _ in loader:
        try:
            gather(inputs)
        except JobError as error:
            accelerator.run.print(f"refused {error}")
        accelerator.backward(model(inputs).sum())
        optimizer.step()
accelerator.run.print(f"after {agreed} {together.tolist()} {answers} {texts}")
accelerator.run.finish()
