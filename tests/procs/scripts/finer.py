"""A script whose policy changes the batch and the number of shards several times, up and down.

``OPTIONS`` is JSON for ``unisono.init``; with ``ODD=8`` rank 1 decides another number of shards than all others after
step 8.
"""

import json
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono

EPOCHS = int(os.environ.get("EPOCHS", "3"))
ODD = int(os.environ.get("ODD", "0"))
LOADERS = int(os.environ.get("LOADERS", "0"))
OPTIONS = json.loads(os.environ.get("OPTIONS", "{}"))

SHAPES = [(96, 12), (192, 24), (96, 6), (240, 36), (120, 30), (96, None), (48, 6), (48, 12)]
"""Batches, and into how many shards they are cut, one after the other; the job has 6 shards."""


class Finer(unisono.Policy):
    """Goes through the shapes, and asks for other workers and topologies on the way."""

    def before_train(self, view: unisono.View) -> None:
        self.set_batch_size(*SHAPES[0])

    def after_step(self, view: unisono.View) -> None:
        if view.step % 4 == 0:
            samples, shards = SHAPES[view.step // 4 % len(SHAPES)]
            if view.step == ODD and run.rank == 1:
                shards = 18
            self.set_batch_size(samples, shards, seen=view.shards)
        if view.step in (9, 21):
            self.resize(3 if view.step == 9 else 2)
        if view.step in (6, 12):
            self.set_topology("tree" if view.step == 6 else "auto")


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that are drawn anew each time, as augmentation does."""

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        fixed = torch.randn(16, generator=torch.Generator().manual_seed(number))
        return fixed + 0.1 * torch.randn(16), number % 5


run = unisono.init(
    batch_size=48,
    shards=6,
    seed=3,
    policies=[Finer()],
    records={"monitor": 1},
    faults={"timeout_s": 30, **OPTIONS.get("faults", {})},
    communication=OPTIONS.get("communication"),
    arithmetic={"threads": 1},
)
torch.manual_seed(1)
model = nn.Sequential(
    nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)
)
body, head = (torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (model[:4], model[4:]))
run.prepare(model, [body, head])


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch[0].repeat(2, 1), batch[1].repeat(2)  # BatchNorm cannot do with a single one
    run.log("share", float(len(batch[0])))
    return F.cross_entropy(model(inputs), labels)


for step in run.steps(Noisy(), epochs=EPOCHS, loader_workers=LOADERS):
    step.run(loss_of)
    if step.number % 3 == 0:
        step.run(loss_of, optimizer=head)
    if step.is_last_in_epoch:
        found = run.evaluate(
            torch.utils.data.Subset(Noisy(), range(240)), lambda model, batch: {"loss": loss_of(model, batch)}
        )
        run.print(f"epoch {step.epoch}: {found['loss']}")
run.finish()
