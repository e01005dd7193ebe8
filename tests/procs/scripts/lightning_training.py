"""A LightningModule with all that shards change: statistics, metrics, what is logged; and callbacks that decide."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

warnings.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

run = unisono.init(batch_size=32, shards=8, seed=3, checkpoints={"every": 4})
strategy = unisono.lightning.Strategy(run)
drawn = torch.Generator().manual_seed(0)
labels = torch.randint(0, 3, (150,), generator=drawn)
inputs = torch.randn(150, 12, generator=drawn) + labels[:, None] / 2
training, held_out = TensorDataset(inputs[:112], labels[:112]), TensorDataset(inputs[112:], labels[112:])


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Logs numbers and metrics, by step and by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.highest = torchmetrics.MetricCollection([torchmetrics.MaxMetric(), torchmetrics.MinMetric()])
        self.ranking = torchmetrics.classification.MulticlassAUROC(3)
        self.held_out = torchmetrics.classification.MulticlassAUROC(3, thresholds=20)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        outputs = self.layers(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self.accuracy(outputs, batch[1])
        self.highest.update(loss.detach())
        self.ranking.update(outputs.softmax(1), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("right", (outputs.argmax(1) == batch[1]).sum().float(), reduce_fx="sum")
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.highest, on_step=True, on_epoch=True)
        self.log("auroc", self.ranking, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        outputs = self.layers(batch[0])
        self.held_out.update(outputs.softmax(1), batch[1])
        self.log("val_loss", F.cross_entropy(outputs, batch[1]))
        self.log("val_auroc", self.held_out, add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        by_step = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)
        by_epoch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.05)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, {"scheduler": by_epoch, "monitor": "val_loss"}]


class Counting(callbacks.Callback):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Counts batches and epochs, and tells what is known at the end of each epoch."""

    def __init__(self) -> None:
        self.hooks: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.hooks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.hooks = dict(state_dict)

    def count(self, hook: str) -> None:
        self.hooks[hook] = self.hooks.get(hook, 0) + 1

    def on_train_epoch_start(self, *_: Any) -> None:
        self.count("epoch_start")

    def on_train_batch_start(self, *_: Any) -> None:
        self.count("batch_start")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.count("before_zero_grad")

    def on_after_backward(self, *_: Any) -> None:
        self.count("after_backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.count("before_optimizer_step")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.count("batch_end")
        self.newest = float(outputs["loss"])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.count("epoch_end")
        known = {key: float(value) for key, value in sorted(trainer.callback_metrics.items()) if "lr-" not in key}
        run.print(f"epoch {trainer.current_epoch}: {trainer.global_step} {json.dumps([known, self.hooks])}")


module, counting = Classifier(), Counting()
best = callbacks.ModelCheckpoint(
    run.dir / "best", filename="{epoch}-{step}", monitor="val_auroc", mode="max", save_top_k=2, save_last=True
)
stopping = callbacks.EarlyStopping("val_loss", patience=3)
trainer = lightning.Trainer(
    strategy=strategy,
    accelerator="cpu",
    max_epochs=6,
    gradient_clip_val=0.5,
    accumulate_grad_batches=2,
    log_every_n_steps=1,
    num_sanity_val_steps=1,
    logger=CSVLogger(run.dir, name="rows"),
    callbacks=[counting, best, stopping, callbacks.LearningRateMonitor()],
    enable_progress_bar=False,
    enable_model_summary=False,
)
loader = DataLoader(training, batch_size=32, shuffle=True)
trainer.fit(module, loader, DataLoader(held_out, batch_size=16))
tested = trainer.validate(module, DataLoader(held_out, batch_size=7), verbose=False)
names = sorted(Path(path).name for path in best.best_k_models)
run.print("after fit:", names, float(best.best_model_score), stopping.wait_count, json.dumps(counting.hooks))
again = lightning.Trainer(
    strategy=unisono.lightning.Strategy(run),
    accelerator="cpu",
    max_steps=5,
    max_epochs=-1,
    limit_train_batches=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
again.fit(module, loader, DataLoader(held_out, batch_size=16))
known = {key: float(value) for key, value in sorted(again.callback_metrics.items())}
run.print("after two fits:", again.global_step, json.dumps([known, tested]))
run.finish(module)
