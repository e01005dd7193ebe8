"""Objects of the script that are part of every checkpoint, and their comparison between workers."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.checkpoint.codec import flatten
from unisono.checkpoint.quick_digest import combined, sums_of_words
from unisono.checkpoint.store import Snapshot
from unisono.errors import CheckpointError, JobError, UnisonoError, Unreadable
from unisono.received import short

# What a checkpoint holds is set part by part, and whatever cannot be set is named.


@contextmanager
def restoring(snapshot: Snapshot, part: str) -> Iterator[None]:
    """Where a part of a snapshot is set: by us, by torch or by an object of the script.

    Raises:
        CheckpointError: it cannot be; names the part. Errors of Unisono and a want of memory stay what they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UnisonoError | MemoryError | torch.OutOfMemoryError) and not isinstance(error, Unreadable):
            raise
        raise CheckpointError(
            f"the {part} in the checkpoint of step {snapshot.step} cannot be restored: {type(error).__name__}: "
            f"{str(error)[:400]}. It is damaged, or of another version of this script or of Unisono: go on from "
            f"another checkpoint, or start in a new folder"
        ) from error


@contextmanager
def all_or_nothing(*things: object) -> Iterator[None]:
    """Where attributes of objects are set: if that fails, all have those again that they had before."""
    before = [dict(vars(thing)) for thing in things]
    try:
        yield
    except BaseException:
        for thing, attributes in zip(things, before, strict=True):
            vars(thing).clear()
            vars(thing).update(attributes)
        raise


def kept(snapshot: Snapshot, name: str) -> Any:
    """One part of what a snapshot holds besides models and optimizers.

    Raises:
        CheckpointError: it is not there; names it.
    """
    if not isinstance(snapshot.state, dict) or name not in snapshot.state:
        raise CheckpointError(f"the checkpoint of step {snapshot.step} has no {name}: {short(snapshot.state)}")
    return snapshot.state[name]


OWN = "unisono "
"""What the names of our own objects begin with: a script that begins to use one, or uses it no more, can go on."""


class Registered(dict[str, Any]):
    """Schedulers, counters, averages of the weights …, by the names they are found again by."""

    def add(self, name: str, thing: Any) -> None:
        """Take in an object.

        Raises:
            JobError: the name is taken, or the object lacks ``state_dict`` or ``load_state_dict``.
        """
        if name in self:
            raise JobError(f"run.register({short(name)}): the name is taken by a {type(self[name]).__name__}")
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise JobError(f"run.register({short(name)}): {type(thing).__name__} has no state_dict and load_state_dict")
        self[name] = thing

    def add_own(self, name: str, thing: Any) -> None:
        """Take in an object of our own. There may be several of a kind."""
        free = (f"{OWN}{name}{number or ''}" for number in range(len(self) + 1))
        self.add(next(each for each in free if each not in self), thing)

    def restore(self, snapshot: Snapshot) -> None:
        """Set every object to its state in a checkpoint.

        Raises:
            CheckpointError: the checkpoint was written with other objects, or one does not take its state; names them.
        """
        states: Mapping[str, Any] = kept(snapshot, "registered")
        if not isinstance(states, dict):
            raise CheckpointError(f"the checkpoint of step {snapshot.step} has no states of registered objects by name")
        missing = [name for name in states if name not in self and not name.startswith(OWN)]
        unknown = [name for name in self if name not in states and not name.startswith(OWN)]
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} and the script registered different objects: "
                f"only in the checkpoint {missing or 'none'}, only in the script {unknown or 'none'}"
            )
        for name, state in states.items():
            if name not in self:
                continue
            with restoring(snapshot, f"state of the {type(self[name]).__name__} that is registered as {name!r}"):
                self[name].load_state_dict(state)


# The comparison of registered objects between workers.


@dataclass(frozen=True, slots=True)
class Differing:
    """The registered objects that differ between workers.

    Attributes:
        new: their digests, by step and name, each with one digest per rank.
        again: names of those that differed in the same way before the run went back: the script wants it so.
    """

    new: dict[str, list[int]]
    again: list[str]


def digests_of_objects(snapshot: Snapshot, ignored: Collection[str]) -> dict[str, int]:
    """Of the tensors that each keeps, by name. Other values may be one worker's own."""
    found = {}
    for name, state in snapshot.state["registered"].items():
        tensors = flatten(state)[1]
        if tensors and name not in ignored:
            found[name] = combined(sums_of_words([tensors[each] for each in sorted(tensors)]))
    return found


def differing(step: int, told: Sequence[tuple[dict[str, int], dict[str, list[int]]]]) -> Differing:
    """Which differ after so many steps.

    Args:
        step: the number of steps after which they were compared.
        told: the digests by name, and the differences when the run went back last, of each rank.
    """
    before = {place: seen for _, theirs in told for place, seen in theirs.items()}
    held = {
        name: [theirs[name] for theirs, _ in told] for name in told[0][0] if all(name in theirs for theirs, _ in told)
    }
    differ = {name: seen for name, seen in held.items() if len(set(seen)) > 1}
    again = [name for name, seen in differ.items() if before.get(f"{step} {name}") == seen]
    return Differing({f"{step} {name}": seen for name, seen in differ.items() if name not in again}, again)


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
