"""Lightning's fit of a ConvNet for small images, alone, with its own DDP, and with Unisono."""

import logging
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from benchmarks.frameworks import UNISONO, Note

BATCHES = 64
ENDLESS = 10**6
DDP = "ddp"


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """A ConvNet that logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(800, 10),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch, or of a shard."""
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """One optimizer."""
        return torch.optim.Adam(self.parameters())


class Noting(Callback):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Notes each step."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def on_train_batch_end(self, *_: Any) -> None:
        """A step is done."""
        self._note()


def train(way: str, batch_size: int, workers: int, note: Note) -> None:
    """Train until the process is stopped."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    strategies: dict[str, Any] = {"alone": lambda: "auto", DDP: lambda: DDP, UNISONO: lambda: _shared(workers)}
    module, images = Classifier(), torch.rand(BATCHES * batch_size, 1, 28, 28)
    trainer = lightning.Trainer(
        strategy=strategies[way](),
        accelerator="cpu",
        devices=workers if way == DDP else 1,
        max_epochs=ENDLESS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Noting(note)],
    )
    # DDP's batches are those of one worker.
    own = batch_size // workers if way == DDP else batch_size
    trainer.fit(module, DataLoader(TensorDataset(images, torch.arange(len(images)) % 10), own, shuffle=True))


def _shared(workers: int) -> Any:
    return unisono.lightning.Strategy(shards=workers)
