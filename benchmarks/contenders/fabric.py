"""Lightning Fabric: DDP over Gloo, as Fabric sets it up, with DDP's best settings handed on."""

from pathlib import Path

import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from lightning_fabric.strategies import DDPStrategy

from benchmarks.contenders.loop import Loop, Sample, batches, fresh_model
from benchmarks.place import Place
from benchmarks.task import Task


def train(task: Task, folder: Path) -> Loop:
    """The loop of Fabric's own guide."""
    place = Place.of()
    strategy = DDPStrategy(
        process_group_backend="gloo",
        cluster_environment=LightningEnvironment(),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    fabric = Fabric(accelerator="cpu", devices=place.workers, strategy=strategy)
    fabric.launch()
    try:
        torch_model = fresh_model(task)
        model, optimizer = fabric.setup(torch_model, task.optimizer(torch_model))
        for batch in batches(task, place):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            fabric.backward(loss)
            optimizer.step()
            yield Sample(loss.item())
    finally:
        dist.destroy_process_group()
