"""The plain PyTorch loop, in one process."""

from pathlib import Path

from benchmarks.contenders.loop import Loop, Sample, batches, fresh_model
from benchmarks.place import Place
from benchmarks.task import Task


def train(task: Task, folder: Path) -> Loop:
    """On the whole batch, in ``options["passes"]`` passes whose gradients autograd adds up (default 1)."""
    passes = int(task.options.get("passes", 1))
    model = fresh_model(task)
    optimizer = task.optimizer(model)
    for batch in batches(task, Place(0, 1)):
        optimizer.zero_grad()
        losses = []
        for part in zip(*(tensor.chunk(passes) for tensor in batch), strict=True):
            loss = task.loss(model, part) / passes
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        yield Sample(sum(loss.item() for loss in losses))
