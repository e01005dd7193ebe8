"""A training whose policy changes the strategy, and the number of workers, every few steps."""

import json
import os

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.train.model.tensors import digest

OTHERS = (
    "local-sgd:every=2,round_every=2",
    "pair-averaging:round_every=3",
    "parameter-server:synchronous=false,max_staleness=4,delay_compensation=0.04,round_every=3",
    "model-averaging:round_every=2",
    "diloco:every=2,round_every=4",
    "parameter-server:synchronous=false,servers=1,round_every=2",
)
SIZES = (3, 2, 4, 1, 3)
EVERY = 4


class Restless(unisono.Policy):
    """All-reduce, another strategy, all-reduce, and so on; a checkpoint where all-reduce begins."""

    def __init__(self) -> None:
        self.due, self.changes = EVERY, 0

    def after_step(self, view: unisono.View) -> None:
        if view.step < self.due:
            return
        self.changes += 1
        self.due = view.step + EVERY
        if self.changes % 2:
            self.set_strategy(OTHERS[self.changes // 2 % len(OTHERS)], changes=self.changes)
        else:
            self.set_strategy("all-reduce", changes=self.changes)
            self.checkpoint()
        if self.changes % 3 == 0:
            self.resize(SIZES[self.changes // 3 % len(SIZES)])


run = unisono.init(batch_size=48, shards=6, seed=4, policies=[Restless()], checkpoints={"keep": 100})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.prepare(model, optimizer)


def note(run: unisono.Run, step: unisono.Step) -> None:
    """Each worker's weights after each step, on the way that all take."""
    with (run.dir / f"digests-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([step.number, run.metrics.get("strategy", "exact"), digest(model)]) + "\n")


run.on("step_ends", note)
draw = torch.Generator().manual_seed(2)
data = torch.utils.data.TensorDataset(torch.randn(480, 12, generator=draw), torch.arange(480) % 4)
for step in run.steps(data, epochs=int(os.environ.get("EPOCHS", "20"))):
    loss = step.run(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    assert not loss > 100, loss  # NaN where a worker has computed nothing yet
run.finish()
