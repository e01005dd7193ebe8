"""One worker of one contender: trains, and times its steps."""

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.contenders import train_of
from benchmarks.programs import serve
from benchmarks.task import Task, Trained

_kept: list[object] = []
"""What is not to be taken apart before this process ends."""


def work(task: Task, folder: Path) -> Trained:
    """The wall time of each step, from its batch in memory to its updated weights."""
    torch.set_num_threads(task.threads)
    seconds: list[float] = []
    losses: list[float] = []
    parts: list[Mapping[str, float]] = []
    loop = train_of(task.contender)(task, folder / "run")
    _kept.append(loop)
    for _ in range(task.warm_up + task.steps):
        begun = perf_counter()
        sample = next(loop)
        seconds.append(perf_counter() - begun)
        losses.append(sample.loss)
        parts.append(sample.parts)
    told = [dict(part) for part in parts[task.warm_up + 1 :] if part]
    return Trained(seconds=seconds[task.warm_up :], losses=losses, parts=told)


if __name__ == "__main__":
    serve(Task, work)
