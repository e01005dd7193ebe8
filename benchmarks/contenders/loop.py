"""What every contender's module is made of: one step after the other, from the same start, on the same samples."""

from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.place import Place
from benchmarks.task import Task


class Sample(NamedTuple):
    """What a contender tells of a step: its loss, and where the time of the step before went, if it knows.

    The loss is that of the samples of this worker, or of the whole batch: the mean over all workers is the same.
    """

    loss: float
    parts: Mapping[str, float] = {}


Loop = Generator[Sample]
"""Trains a step each time it is asked for one."""


def fresh_model(task: Task) -> nn.Module:
    """The model, with the weights that every contender starts from."""
    torch.manual_seed(0)
    return task.model()


def batches(task: Task, place: Place) -> Iterator[tuple[Any, ...]]:
    """This worker's samples of one global batch after the other, without end. Already in memory."""
    data = task.data()
    mine = place.part(task.batch_size)
    starts = range(0, len(data), task.batch_size)
    views = [tuple(tensor[start:][mine] for tensor in data.tensors) for start in starts]
    while True:
        yield from views
