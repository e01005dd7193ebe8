"""A module trains with what KIND names: a stream, steps without a loss, hooks that look, a validation that fails …"""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import unisono

KIND = os.environ["KIND"]
run = unisono.init(batch_size=12, shards=6, seed=3, checkpoints={"every": 2})
drawn = torch.Generator().manual_seed(3)
INPUTS = torch.randn(40, 6, generator=drawn)
LABELS = INPUTS[:, :2].argmax(1)


class Stream(IterableDataset[Any]):
    """Gives samples with noise; each epoch has one more than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for row, label in zip(INPUTS[: 30 + self.epoch], LABELS, strict=False):
            yield row + 0.1 * torch.rand(6), label


class Net(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)
        self.seen: list[float] = []
        self.validated: list[int] = []
        self.teacher = nn.Linear(6, 2).requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if KIND == "looking":
            inputs, labels = batch
            self.log("start", inputs.sum() + len(labels))
        return -1 if KIND == "short" and batch_idx == 1 else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if KIND == "teacher":
            loss = loss + (self.net(batch[0]) - self.teacher(batch[0])).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        if KIND == "none" and (batch_idx == 1 or batch[1].sum() == 0):
            return None
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if KIND == "teacher":
            self.teacher.weight.data.lerp_(self.net.weight.data, 0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if KIND == "failing" and self.current_epoch == 1 and batch_idx == 2 and self.trainer.max_epochs == 3:
            raise ValueError(f"in batch {batch_idx}")
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_start(self) -> None:
        self.validated.append(self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if KIND == "clock" and (run.rank > 0 or batch_idx == 2):  # the clocks of others say all the time that it is due
            self.trainer._last_val_time -= 7200
        self.seen.append(float(outputs["loss"]) if outputs else -1.0)
        if KIND == "looking":
            self.log("end", batch[0].abs().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


torch.manual_seed(1)
module = Net()
VALIDATION = TensorDataset(INPUTS[:30], LABELS[:30])
data: Any = Stream() if KIND == "stream" else TensorDataset(INPUTS, LABELS)
pruned: dict[str, Any] = {
    "pruned": {"pruning_fn": "l1_unstructured", "make_pruning_permanent": False},
    "permanent": {"pruning_fn": "l1_unstructured"},
}


def train(epochs: int) -> Any:
    pruning = lightning.pytorch.callbacks.ModelPruning
    trainer = lightning.Trainer(
        callbacks=[pruning(**pruned[KIND], parameter_names=["weight"], amount=0.2)] if KIND in pruned else [],
        strategy=unisono.lightning.Strategy(run),
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=timedelta(hours=1) if KIND == "clock" else None,
    )
    validation = DataLoader(VALIDATION, 7) if KIND in ("clock", "failing") else None
    try:
        trainer.fit(module, DataLoader(data, batch_size=12), validation)
    except ValueError as error:
        progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress.current
        run.print("after", error, progress.started, progress.completed)
    return trainer


trainer = train(3)
if KIND in ("permanent", "failing"):
    print("masks", [*dict(module.named_buffers())])
    trainer = train(2)
if KIND == "clock":
    print("after validations at", module.validated[-2:])  # on all workers
known = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
run.print("after", known, trainer.global_step, module.net.weight.tolist())
run.finish(module)
