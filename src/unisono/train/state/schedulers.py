"""Learning-rate schedulers that a script uses and has not registered."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.checkpoint.codec import flatten
from unisono.errors import CheckpointError


def holds_schedulers(registered: Mapping[str, Any]) -> bool:
    """Whether a scheduler is registered, or what a framework's loop registers holds its own, and says so."""
    return any(isinstance(each, LRScheduler) or getattr(each, "has_schedulers", False) for each in registered.values())


def unregistered_schedulers(
    optimizers: Sequence[Optimizer], registered: Mapping[str, Any]
) -> list[tuple[str, LRScheduler]]:
    """Those of some optimizers that are not registered, with names that are the same in each start of a script.

    Left out are those that are part of another one, that have no state a checkpoint can keep, and that are as many of
    one kind for one optimizer: nobody can say which is which. None is looked for where a framework holds its own.
    """
    if any(getattr(each, "has_schedulers", False) for each in registered.values()):
        return []
    numbers = {id(one): number for number, one in enumerate(optimizers)}
    found = [one for one in _schedulers(optimizers) if id(getattr(one, "optimizer", None)) in numbers]
    parts = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    named = [
        (f"{type(one).__name__} of optimizer {numbers[id(one.optimizer)]}", one)
        for one in found
        if id(one) not in parts and _is_kept(one)
    ]
    counts, known = Counter(name for name, _ in named), set(map(id, registered.values()))
    alone = ((name, one) for name, one in named if counts[name] == 1 and id(one) not in known)
    return sorted(alone, key=lambda each: each[0])


def _schedulers(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    # An optimizer knows nothing of its schedulers. They refer to it themselves, or by a dictionary of their attributes.
    found = gc.get_referrers(*optimizers)
    if attributes := [one for one in found if type(one) is dict and "optimizer" in one and "__name__" not in one]:
        found += gc.get_referrers(*attributes)
    # By type: what an object says of its class may be code that loads.
    return [one for one in found if issubclass(type(one), LRScheduler)]


def _is_kept(scheduler: LRScheduler) -> bool:
    try:
        flatten(scheduler.state_dict())
    except CheckpointError:
        return False
    return True
