"""What a script's own loop is written with: loaders that give shards, what acts once for each step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from unisono.errors import JobError
from unisono.host.tracebacks import warn
from unisono.train.script_loop import ScriptLoop

Read = Callable[["ScriptLoader"], Iterator[Any]]
"""Begins a pass over a loader."""


class ScriptLoader:
    """Stands for a loader, and is in all but its iteration like it. Its batches are global batches.

    Attributes:
        base: the script's own loader.
    """

    def __init__(self, loader: DataLoader[Any], read: Read) -> None:
        self.base, self._read = loader, read

    def __iter__(self) -> Iterator[Any]:
        """The batches of this worker's shards, on its device; all batches if no model is in training mode."""
        return self._read(self)

    def __len__(self) -> int:
        """The number of global batches; not that of this worker's shards."""
        return len(self.base)

    def __getattr__(self, name: str) -> Any:
        if name in ("base", "_read"):  # it is being made
            raise AttributeError(name)
        return getattr(self.base, name)


class TurnBatches:
    """The batches of a pass over a loader. It tells once that Python's ``enumerate`` counts turns, and not batches.

    ``words`` say that.
    """

    def __init__(self, batches: Iterator[Any], loop: ScriptLoop, words: str) -> None:
        self._batches, self._loop, self._words, self._is_told = batches, loop, words, False

    def __iter__(self) -> TurnBatches:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if self._loop.turn > 0 and not (self._is_told or self._loop.has_told or self._loop.is_outside):
            self._is_told = True  # looked for once in a pass: it takes as long as there are objects
            if any(type(other) is enumerate for other in gc.get_referrers(self)):
                self._loop.has_told = True
                warn(self._words)
        return batch

    def close(self) -> None:
        """Leave the pass."""
        getattr(self._batches, "close", lambda: None)()


def guard_optimizer(optimizer: Optimizer, loop: ScriptLoop, is_elsewhere: Callable[[], bool]) -> None:
    """Have an optimizer's step act once for each step of a script's loop.

    ``is_elsewhere`` says that it is used outside of such loops, by ``step.run`` or when the run is over.
    """
    if (known := getattr(optimizer.step, "guard", None)) is not None:  # an earlier run has trained it
        known[:] = loop, is_elsewhere
        return
    make = optimizer.step
    guard: list[Any] = [loop, is_elsewhere]

    @wraps(getattr(make, "__func__", make))
    def step(self: Optimizer, closure: Any = None) -> Any:
        present, elsewhere = guard
        if elsewhere():
            return make(closure) if closure is not None else make()
        if closure is not None:
            raise JobError(present.refused("closure"))
        return present.take_step(self, make)

    step.guard = guard  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # which schedulers wrap once more


def is_scheduler(thing: Any) -> bool:
    """Whether something changes hyperparameters from step to step, and has a state."""
    names = ("optimizer", "step", "state_dict", "load_state_dict")
    return isinstance(thing, LRScheduler) or all(hasattr(thing, name) for name in names)


def guard_scheduler(scheduler: Any, loop: ScriptLoop) -> None:
    """Have a scheduler's step act once for each step of a script's loop, and outside of loops."""
    kind = type(scheduler)

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        return kind.step(self, *arguments, **options) if loop.is_last else None

    # Its class, and not an attribute: what a scheduler has in attributes is its state.
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": wraps(kind.step)(step), "__module__": kind.__module__})
