"""What one process writes of a checkpoint, where several write one together: the devices of a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.device import is_accelerator, sent_to
from unisono.errors import CheckpointError, Superseded
from unisono.received import short

T = TypeVar("T")


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that lies row by row, as safetensors wants it; from an accelerator it is under way yet."""
    if is_accelerator(tensor.device):
        return sent_to(torch.device("cpu"), tensor.detach().contiguous())
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Share:
    """This process's share of a checkpoint. Its tensors are whole, and each is written by one process.

    Attributes:
        number: the number of the process. The first one, 0, has the last word: it writes what is no tensor, says which
            files there are, and puts the checkpoint in its place.
        copy: a function that makes what is written here of a tensor; None for what another process writes. Called by
            all, in the same order.
        gather: a function that gives the JSON value of each process, in their order.
    """

    number: int = 0
    copy: Callable[[Tensor], Tensor | None] = copied
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    @property
    def is_first(self) -> bool:
        """Whether this process has the last word."""
        return self.number == 0

    def together(self, act: Callable[[], T]) -> list[T]:
        """Do something on all processes; returns what came of it on each, as JSON values.

        Raises:
            CheckpointError: one of them could not; says which, and why.
            OSError: this one could not.
            Superseded: the job goes on without this worker.
        """
        made: T | None = None
        failed: CheckpointError | OSError | Superseded | None = None
        try:
            made = act()
        except (CheckpointError, OSError, Superseded) as error:
            failed = error
        told = self.gather([made, "" if failed is None else str(failed) or type(failed).__name__])
        if failed is not None:
            raise failed
        for number, each in enumerate(told):
            match each:
                case [_, ""]:
                    continue
                case [_, str(why)]:
                    raise CheckpointError(f"device {number} of its worker: {why}")
            raise CheckpointError(f"device {number} of its worker says {short(each)}")
        return [each for each, _ in told]


WHOLE = Share()
"""All of it, by this process alone."""


def require_each_once(names: Sequence[str], written: Sequence[Sequence[str]], part: str) -> None:
    """Refuse a checkpoint in which a tensor is missing, or is there twice.

    Args:
        names: the names of the tensors that a part of it has.
        written: those that each process has written.
        part: what they are of.

    Raises:
        CheckpointError: names one.
    """
    counts = Counter(chain.from_iterable(written))
    if odd := next((name for name in names if counts[name] != 1), ""):
        raise CheckpointError(f"{odd} of its {part} was written by {counts[odd]} devices of its worker, and not by one")
