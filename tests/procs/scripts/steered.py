"""A training whose policy changes topology, batch and workers every few steps, and looks at the world outside."""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.adapt.norms import Monitoring

TOPOLOGIES = ("ring", "tree", "auto", "star", "direct")
SIZES = (3, 5, 2, 4, 1)
BATCHES = (48, 96, 64, 120, 32)


class Restless(unisono.Policy):
    observe_every = 5

    def __init__(self) -> None:
        self.changes = 0

    def observe(self, view: unisono.View) -> dict[str, unisono.adapt.view.Figure]:
        assert run.is_main
        return {"twice": 2 * view.step, "said": "main"}

    def after_step(self, view: unisono.View) -> None:
        seen = view.observed[self.name]["twice"] if view.step >= 5 else 0
        assert len(view.workers) == view.world_size
        if view.step % 4 == 0:
            number = self.changes % 5
            self.changes += 1
            self.set_topology(TOPOLOGIES[number], changes=self.changes)
            self.set_batch_size(BATCHES[number], seen=seen)
            self.resize(SIZES[number])
            if view.steady > 1:
                assert all(worker.step_s > 0 for worker in view.workers)
        if view.step % 10 == 0:
            self.measure_links()


run = unisono.init(batch_size=64, shards=8, seed=4, policies=[Restless()], records={"monitor": Monitoring(every=2)})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.prepare(model, optimizer)
draw = torch.Generator().manual_seed(2)
data = torch.utils.data.TensorDataset(torch.randn(600, 12, generator=draw), torch.arange(600) % 4)
for step in run.steps(data, epochs=10):
    step.run(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
run.finish()
