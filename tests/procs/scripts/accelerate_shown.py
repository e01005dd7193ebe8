"""A model keeps its last output, and counts; the body of the loop counts its turns."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

INPUTS = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))


class Shows(nn.Module):
    """Keeps what somebody may look at."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.shown = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.shown = self.out(x)
        return self.shown


accelerator = unisono.accelerate.Accelerator(shards=4)
model = Shows()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = DataLoader(TensorDataset(INPUTS, INPUTS[:, :3].argmax(1)), 8)
model, optimizer, loader = accelerator.prepare(model, optimizer, data)
turns = 0
for inputs, labels in loader:
    turns += 1
    accelerator.backward(F.cross_entropy(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
accelerator.run.print(f"after {turns} turns")
accelerator.run.finish()
