"""A module keeps what it evaluates, or trains with, in the way that KIND names; PLAIN leaves Lightning alone."""

import os
from collections import deque
from typing import Any

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND, PLAIN = os.environ["KIND"], bool(os.environ.get("PLAIN"))
GENERATOR = torch.Generator().manual_seed(3)
INPUTS, HELD_OUT = torch.randn(48, 6, generator=GENERATOR), torch.randn(29, 6, generator=GENERATOR)
LABELS, ANSWERS = INPUTS[:, :2].argmax(1), HELD_OUT[:, :2].argmax(1)
SELDOM = torch.arange(48) % 12 == 11


class Keeps(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Counts right answers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seldom = nn.Linear(6, 2), torchmetrics.SumMetric()
        self.right, self.rows, self.by_batch = 0, deque[int](), dict[int, Tensor]()
        self.register_buffer("counts", torch.zeros(2))
        self.losses, self.outputs, self.seen = list[float](), list[Tensor](), 0

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if KIND == "trained":
            self.log("largest", batch[0].max(), reduce_fx="max", on_step=False, on_epoch=True)
            self.outputs.append(self.net(batch[0]).detach())
            self.losses += [loss.item()] * len(batch[0])
            self.seen += len(batch[0])
        if KIND == "seldom" and batch[2].any():
            self.seldom.update(batch[2].sum())
        return loss

    def on_train_epoch_end(self) -> None:
        if KIND == "seldom":
            self.log("seldom", self.seldom.compute())
        if KIND == "trained":
            self.log("size", torch.cat(self.outputs).abs().mean())
            self.log("loss of all", sum(self.losses) / len(self.losses))
            self.log("seen", float(self.seen))
            self.outputs.clear()
            self.losses = []

    def on_validation_epoch_start(self) -> None:
        self.right = 0
        self.rows.clear()
        self.by_batch.clear()
        self.counts.zero_()

    def validation_step(self, batch: Any, number: int) -> None:
        outputs = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(outputs, batch[1]))
        right = int((outputs.argmax(1) == batch[1]).sum())
        if KIND == "number":
            self.right += right
        elif KIND == "deque":
            self.rows.append(right)
        elif KIND == "dict":
            self.by_batch[number] = torch.tensor(right)
        elif KIND == "buffer":
            self.counts += torch.tensor([right, len(batch[1])])

    def on_validation_epoch_end(self) -> None:
        kept = {"number": self.right, "deque": sum(self.rows), "dict": sum(map(int, self.by_batch.values()))}
        if KIND in (*kept, "buffer"):
            self.log("right", float(kept.get(KIND, self.counts[0])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


module, strategy = Keeps(), "auto"
if not PLAIN:
    import unisono

    strategy = unisono.lightning.Strategy(shards=6)
with torch.no_grad():
    for parameter in module.parameters():
        parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_epochs=2, strategy=strategy, accelerator="cpu", num_sanity_val_steps=0, **quiet)
size = 2 if KIND == "small" else 12
trainer.fit(
    module,
    DataLoader(TensorDataset(INPUTS, LABELS, SELDOM), size),
    DataLoader(TensorDataset(HELD_OUT, ANSWERS), 4),
)
print("after", {name: round(float(value), 4) for name, value in sorted(trainer.callback_metrics.items())}, flush=True)
