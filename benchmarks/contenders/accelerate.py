"""Hugging Face Accelerate: DDP over Gloo, as Accelerate sets it up, with DDP's best settings handed on."""

from pathlib import Path

from accelerate import Accelerator, DistributedDataParallelKwargs

from benchmarks.contenders.loop import Loop, Sample, batches, fresh_model
from benchmarks.place import Place
from benchmarks.task import Task


def train(task: Task, folder: Path) -> Loop:
    """The loop of Accelerate's own guide."""
    settings = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[settings])
    try:
        torch_model = fresh_model(task)
        model, optimizer = accelerator.prepare(torch_model, task.optimizer(torch_model))
        for batch in batches(task, Place.of()):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            yield Sample(loss.item())
    finally:
        accelerator.end_training()
