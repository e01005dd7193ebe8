"""The plain PyTorch loop, in one process."""

from pathlib import Path

from benchmarks.contenders.loop import Loop, Sample, batches, fresh_model
from benchmarks.place import Place
from benchmarks.task import Task


def train(task: Task, folder: Path) -> Loop:
    """On the whole batch."""
    model = fresh_model(task)
    optimizer = task.optimizer(model)
    for batch in batches(task, Place(0, 1)):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        yield Sample(loss.item())
