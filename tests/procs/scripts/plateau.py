"""A trainer whose schedule follows the training loss. The first half of each epoch is harder than the second."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(64, 6, generator=generator)
labels = (inputs @ torch.randn(6, 3, generator=generator)).argmax(1)
labels[:32] = torch.randint(0, 3, (32,), generator=generator)


class Stops(unisono.Callback):
    """Has the training stop after an epoch, in the middle of it; tells what each epoch came to."""

    def on_step_end(self, trainer: unisono.Trainer, step: unisono.Step, loss: float) -> None:
        if step.number == 16:
            trainer.stop()

    def on_epoch_end(self, trainer: unisono.Trainer, record: Any) -> None:
        trainer.run.print(f"epoch {record.epoch}: {record.loss.hex()} lr {optimizer.param_groups[0]['lr']}")


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


run = unisono.init(batch_size=16, seed=0, shards=2)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
trainer = unisono.Trainer(model, optimizer, loss_fn, run=run, scheduler=scheduler, callbacks=[Stops()], progress=False)
trainer.fit(TensorDataset(inputs, labels), epochs=7, shuffle=False)
run.print(f"after {trainer.finish()}")
