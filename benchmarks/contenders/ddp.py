"""torch's DistributedDataParallel over Gloo."""

from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.loop import Loop, Sample, batches, fresh_model
from benchmarks.place import Place
from benchmarks.task import Task


def train(task: Task, folder: Path) -> Loop:
    """With its best settings: no copy of the gradients, and no broadcast of buffers in each step.

    ``options["bucket_mb"]`` is the size of its buckets.
    """
    place = Place.of()
    meeting = f"file://{folder.absolute()}.ddp"  # the port may be that of a run in the same process
    dist.init_process_group("gloo", meeting, rank=place.rank, world_size=place.workers)
    try:
        model = DistributedDataParallel(
            fresh_model(task),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            bucket_cap_mb=float(task.options["bucket_mb"]),
        )
        optimizer = task.optimizer(model)
        for batch in batches(task, place):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            yield Sample(loss.item())
    finally:
        dist.destroy_process_group()
