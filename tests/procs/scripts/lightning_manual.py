"""Modules of Lightning that optimize by themselves, by name; on a run, or with Lightning alone."""

import math
import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

SHAPE = os.environ["SHAPE"]
is_plain, is_still = "PLAIN" in os.environ, "STILL" in os.environ

drawn = torch.Generator().manual_seed(0)
labels = torch.randint(0, 3, (102,), generator=drawn)
inputs = torch.randn(102, 12, generator=drawn) + labels[:, None] / 2


def network(before: int, behind: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, 16), nn.ReLU(), nn.Dropout(0.0 if is_still else 0.2), nn.Linear(16, behind))


def noise(rows: int) -> Tensor:
    """What a training step draws, or, to compare with Lightning alone, does not."""
    return torch.full((rows, 4), 0.5) if is_still else torch.randn(rows, 4)


class Manual(pl.LightningModule):  # type: ignore[misc]
    """Counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.samples = 0


class Gan(Manual):
    """Two networks, each with an optimizer and a scheduler, which are frozen in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = network(4, 12), network(12, 1)

    def judged(self, made: Tensor, wish: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.critic(made), torch.full((len(made), 1), wish))

    def training_step(self, batch: Any, number: int) -> None:
        of_generator, of_critic = self.optimizers()
        drawn = noise(len(batch[0]))
        self.toggle_optimizer(of_critic)
        critic_loss = self.judged(batch[0], 1.0) + self.judged(self.generator(drawn).detach(), 0.0)
        of_critic.zero_grad()
        self.manual_backward(critic_loss)
        self.clip_gradients(of_critic, 0.5, "norm")
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        generator_loss = self.judged(self.generator(drawn), 1.0)
        of_generator.zero_grad()
        self.manual_backward(generator_loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log_dict({"critic": critic_loss, "generator": generator_loss}, on_epoch=True)
        self.samples += len(batch[0])

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8) for optimizer in optimizers]


class Accumulating(Manual):
    """Updates with each third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(12, 3)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.log("loss", loss, on_epoch=True)
        self.samples += len(batch[0])
        if number % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Closed(Accumulating):
    """Gives its optimizer a closure."""

    def training_step(self, batch: Any, number: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)
        self.samples += len(batch[0])


class Idle(Accumulating):
    """Goes backward in no step of the first epoch."""

    def training_step(self, batch: Any, number: int) -> Tensor | None:  # type: ignore[override]
        return super().training_step(batch, 2) if self.current_epoch else None


shards = {"shards": 1} if is_still else {}
run: Any = None if is_plain else unisono.init(seed=3, checkpoints={"every": 2}, **shards)  # type: ignore[arg-type]
torch.manual_seed(3)
module = {"gan": Gan, "accumulated": Accumulating, "closed": Closed, "idle": Idle}[SHAPE]()
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    strategy="auto" if is_plain else unisono.lightning.Strategy(run),
)
trainer.fit(module, DataLoader(TensorDataset(inputs, labels), batch_size=32))
total = math.fsum(float(value.double().sum()) for value in module.state_dict().values())
logged = {name: round(float(value), 5) for name, value in trainer.callback_metrics.items()}
words = f"after {trainer.global_step} updates, {module.samples} samples: {total:.5f} {logged}"
if is_plain:
    print(words)
else:
    run.print(words)
    run.finish()
