"""One worker of several loops that take turns: what differs by a few percent is compared within one process.

All loops are alive at once. In each turn every loop trains a few steps, in an order drawn anew, the same on all
workers. So whatever the machine does meanwhile, and whatever this process is like, it is so for all loops.
"""

import random
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter

import torch
from pydantic import BaseModel, ConfigDict

from benchmarks.contenders import train_of
from benchmarks.contenders.loop import Loop
from benchmarks.programs import serve
from benchmarks.task import Task


class Turns(BaseModel):
    """What the workers are told.

    Attributes:
        loops: what takes turns; their steps are those of one turn, and the first turn warms up.
        turns: how many are counted.
        seed: of the order.
    """

    model_config = ConfigDict(frozen=True)

    loops: tuple[Task, ...]
    turns: int
    seed: int


class Taken(BaseModel):
    """What one worker found.

    Attributes:
        seconds: for each loop, of a step in each counted turn.
        losses: for each loop, of each step from the first on.
    """

    seconds: list[list[float]]
    losses: list[list[float]]


def work(task: Turns, folder: Path) -> Taken:
    """Let the loops take turns."""
    order = random.Random(task.seed)  # noqa: S311  it has to be the same on all workers
    numbers = range(len(task.loops))
    taken = Taken(seconds=[[] for _ in numbers], losses=[[] for _ in numbers])
    with ExitStack() as opened:
        loops = []
        for number, one in enumerate(task.loops):
            torch.set_num_threads(one.threads)
            whole = one.model_copy(update={"warm_up": 0, "steps": one.steps * (task.turns + 1)})
            loops.append(opened.enter_context(closing(train_of(one.contender)(whole, folder / f"run-{number}"))))
        for turn in range(task.turns + 1):
            # At first as they are listed: an open run hides from torch where this worker stands among the others.
            for number in order.sample(numbers, len(numbers)) if turn else numbers:
                seconds = _turn(loops[number], task.loops[number].steps, taken.losses[number])
                if turn:
                    taken.seconds[number].append(seconds)
    return taken


def _turn(loop: Loop, steps: int, losses: list[float]) -> float:
    begun = perf_counter()
    losses.extend(next(loop).loss for _ in range(steps))
    return (perf_counter() - begun) / steps


if __name__ == "__main__":
    serve(Turns, work)
