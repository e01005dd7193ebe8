"""A plain accelerate script: clipping, a scheduler, evaluation in each epoch, and what it decides by that."""

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

set_seed(3)
accelerator = unisono.accelerate.Accelerator(
    seed=3, checkpoints={"every": 2}, gradient_accumulation_steps=2 if "accumulate" in sys.argv else 1
)
drawn = torch.Generator().manual_seed(0)
labels = torch.randint(0, 3, (140,), generator=drawn)
inputs = torch.randn(140, 12, generator=drawn) + labels[:, None] / 2
training, held_out = TensorDataset(inputs[:102], labels[:102]), TensorDataset(inputs[102:], labels[102:])


class Centred(nn.Module):
    """Subtracts a running mean, which is a buffer; shards of one sample will do."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(values.detach().mean(0), 0.1)
        return values - self.mean


class Best:
    """The best epoch so far, and the newest norm, in checkpoints."""

    def __init__(self) -> None:
        self.right, self.epoch, self.norm = -1, -1, 0.0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


model: Any = nn.Sequential(nn.Linear(12, 16), Centred(), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=30)
loader: Any = DataLoader(training, batch_size=32, shuffle=True)
evaluation: Any = DataLoader(held_out, batch_size=5)
model, optimizer, loader, evaluation, scheduler = accelerator.prepare(model, optimizer, loader, evaluation, scheduler)
best = Best()
accelerator.register_for_checkpointing(best)
seen_in_training = 0
for epoch in range(5):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen_in_training += int(torch.rand(()) < 2)  # it draws behind the backward pass
        if accelerator.sync_gradients:
            best.norm = float(norm)
    model.eval()
    gathered = []
    for batch in evaluation:
        with torch.no_grad():
            outputs = model(batch[0])
        gathered.append(accelerator.gather_for_metrics((outputs, batch[1])))
    outputs, answers = (torch.cat(each) for each in zip(*gathered, strict=True))
    assert torch.equal(answers.cpu(), labels[102:])
    alone = 0.0
    for batch in evaluation:
        with torch.no_grad():
            alone += float(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"))
    right = int((outputs.argmax(1) == answers).sum())
    if right > best.right:
        best.right, best.epoch = right, epoch
    found = [accelerator.mean_loss, accelerator.steps_done, right, alone, scheduler.get_last_lr()[0], vars(best)]
    accelerator.print(f"epoch {epoch}: {json.dumps(found)}")
accelerator.end_training()
accelerator.print(f"after training: {json.dumps(vars(best))}")
