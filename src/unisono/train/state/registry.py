"""The registry of state: whatever has a state is in it once, under a name, with what may be done with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Literal, get_type_hints

import torch

from unisono.checkpoint.codec import flatten
from unisono.checkpoint.snapshot import Snapshot
from unisono.errors import CheckpointError, JobError, UnisonoError, Unreadable
from unisono.received import short, value_of
from unisono.word_sums import combined, sums_of_words

Moment = Literal["early", "behind", "weights", "kept", "script", "last"]
"""A moment at which entries are restored.

``early``: the models are there, and the script goes on. ``behind``: this worker gets what an update has changed.
``weights`` and ``kept``: after one of these, models, and what optimizers keep per parameter. ``script``: the script has
made everything. ``last``: after that, since a scheduler sets its optimizer's learning rates when it is made.
"""

When = tuple[Moment, ...]

UPDATE: When = ("early", "behind")
"""When what an update changes is restored."""

REGISTERED = ("registered",)
"""Where the script's objects are in a checkpoint."""

OWN = "unisono "
"""What the names of our own objects among them begin with: a script that begins to use one, or uses it no more, can go
on."""

ABSENT = object()
"""In the place of what is not there."""

Place = tuple[str, ...]
"""The names under which a state is found in a checkpoint, one in the other."""


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


def kept(snapshot: Snapshot, *place: str, may_lack: bool = False) -> Any:
    """Return a part of a snapshot that belongs to no model and no optimizer.

    Args:
        snapshot: the snapshot.
        place: the names of the part, one in the other.
        may_lack: whether to return :data:`ABSENT` if it is not there.

    Raises:
        CheckpointError: it is not there; names it.
    """
    part = snapshot.state
    for name in place:
        if not isinstance(part, dict) or name not in part:
            if may_lack:
                return ABSENT
            raise CheckpointError(f"the checkpoint of step {snapshot.step} has no {name}: {short(part)}")
        part = part[name]
    return part


# Things that have no ``state_dict`` of their own that would do.


class Attribute:
    """The state of an attribute whose value is plain, or a data class of plain values: the value itself.

    Args:
        owner: the object that has the attribute.
        name: the name of the attribute.
        kind: the type of its values, for :func:`unisono.received.value_of`.
    """

    def __init__(self, owner: Any, name: str, kind: Any) -> None:
        self.owner, self._name, self._kind = owner, name, kind

    def state_dict(self) -> Any:
        """The value as plain ones."""
        value = getattr(self.owner, self._name)
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    def load_state_dict(self, state: Any) -> None:
        """Set the attribute to another value.

        Raises:
            Unreadable: it is of another type, or makes no sense. Then nothing has changed.
        """
        setattr(self.owner, self._name, kept_value(self._kind, state, self._name))


def kept_value(kind: Any, state: Any, name: str) -> Any:
    """A value of a type from what :func:`dataclasses.asdict` has made of it; of a data class, every field is there.

    Raises:
        Unreadable: it is none.
    """
    if is_dataclass(kind):
        value_of(get_type_hints(kind), state, name)
    return value_of(kind, state, name)


class Copied:
    """An object whose state is copied, so that neither changes with the other."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def state_dict(self) -> Any:
        """A copy of its state."""
        return deepcopy(self.owner.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Set the object to a copy of a state."""
        self.owner.load_state_dict(deepcopy(state))


# What is in the registry.


@dataclass(frozen=True, eq=False)
class Entry:
    """Something with a state, and what may be done with it.

    Attributes:
        place: the names under which its state is found in a checkpoint, one in the other.
        thing: the object, with ``state_dict`` and ``load_state_dict``.
        when: the moments at which it is restored.
        checkpoint: whether its state is part of checkpoints, and of what the run goes back to.
        hand_over: whether a worker that lacks the state gets it from another one.
        compare: whether its tensors are the same on all workers, which compare them at boundaries.
        optional: whether a checkpoint without it is gone on from.
    """

    place: Place
    thing: Any
    when: When = ("script",)
    checkpoint: bool = True
    hand_over: bool = True
    compare: bool = False
    optional: bool = False

    @property
    def name(self) -> str:
        """The last of the names."""
        return self.place[-1]

    @property
    def owner(self) -> Any:
        """The object whose attributes change when it is restored."""
        return self.thing.owner if isinstance(self.thing, Attribute | Copied) else self.thing

    @property
    def is_registered(self) -> bool:
        """Whether it is among the script's objects."""
        return self.place[:-1] == REGISTERED

    @property
    def may_lack(self) -> bool:
        """Whether it stays as it is where a state is without it: not all is in checkpoints, or is handed over."""
        return self.optional or not (self.checkpoint and self.hand_over)

    def capture(self, tree: dict[str, Any]) -> None:
        """Put its state into a tree."""
        _node(tree, self.place)[self.name] = self.thing.state_dict()

    def restore(self, snapshot: Snapshot, moment: Moment) -> None:
        """Set it to its state in a checkpoint.

        Raises:
            CheckpointError: it is not there, or cannot be set; names it.
        """
        what = f"state of the {type(self.owner).__name__} that is registered as {self.name!r}"
        with restoring(snapshot, what if self.is_registered else self.place[0]):
            if (state := kept(snapshot, *self.place, may_lack=self.may_lack)) is not ABSENT:
                self.thing.load_state_dict(state)


def _node(tree: dict[str, Any], place: Place) -> dict[str, Any]:
    """The part of a tree that has what is found at a place."""
    for name in place[:-1]:
        tree = tree.setdefault(name, {})
    return tree


def _copied(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree of other dicts with the same values."""
    return {name: _copied(value) if type(value) is dict else value for name, value in tree.items()}


class Registry:
    """The objects that have a state: our own and the script's, by the names of their state in checkpoints."""

    def __init__(self) -> None:
        self._entries: dict[Place, Entry] = {}

    @property
    def objects(self) -> dict[str, Any]:
        """The script's objects, and ours among them, by name: schedulers, counters, averages of the weights."""
        return {entry.name: entry.thing for entry in self._entries.values() if entry.is_registered}

    def add(
        self, name: str, thing: Any, *, within: Place = REGISTERED, when: When = ("script",), **rules: bool
    ) -> None:
        """Take in something with a state.

        Args:
            name: the name.
            thing: an object with ``state_dict`` and ``load_state_dict``.
            within: the names of what it belongs to; by default it is one of the script's objects, which are compared.
            when: the moments at which it is restored.
            rules: further attributes of its :class:`Entry`.

        Raises:
            JobError: the name is taken, or the object lacks ``state_dict`` or ``load_state_dict``.
        """
        place = (*within, name)
        if place in self._entries:
            taken = type(self._entries[place].owner).__name__
            raise JobError(f"run.register({short(name)}): the name is taken by a {taken}")
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise JobError(f"run.register({short(name)}): {type(thing).__name__} has no state_dict and load_state_dict")
        self.put(Entry(place, thing, when, **({"compare": within == REGISTERED} | rules)))

    def add_own(self, name: str, thing: Any) -> None:
        """Take in an object of our own, with which the script may begin, or go on without. There may be several."""
        free = (f"{OWN}{name}{number or ''}" for number in range(len(self._entries) + 1))
        own = next(own for own in free if (*REGISTERED, own) not in self._entries)
        self.add(own, thing, optional=True)

    def put(self, entry: Entry) -> None:
        """Take in an entry of a kind of its own, or in place of one that is there."""
        self._entries[entry.place] = entry

    def capture(self, step: int) -> Snapshot:
        """The state of all that is part of checkpoints."""
        tree: dict[str, Any] = {"registered": {}}
        for entry in self._entries.values():
            if entry.checkpoint:
                entry.capture(tree)
        return Snapshot(step, tree.pop("model", {}), tree.pop("optimizer", []), tree)

    def as_read(self, snapshot: Snapshot) -> Snapshot:
        """Return a checkpoint as it may be restored: without the parts that checkpoints must not have."""
        state = _copied(snapshot.state)
        for entry in self._entries.values():
            if not entry.checkpoint:
                _node(state, entry.place).pop(entry.name, None)
        return replace(snapshot, state=state)

    def handed_over(self, snapshot: Snapshot) -> Snapshot:
        """A state as a worker that lacks it gets it: with what is no part of checkpoints, and that as it is now."""
        state = _copied(snapshot.state)
        for entry in self._entries.values():
            if not entry.hand_over:
                _node(state, entry.place).pop(entry.name, None)
            elif not entry.checkpoint:
                entry.capture(state)
        return replace(snapshot, state=state)

    def restore(self, snapshot: Snapshot, *moments: Moment) -> None:
        """Set all that is restored at some moments to its state in a checkpoint, moment after moment.

        Raises:
            CheckpointError: the checkpoint was written with other objects, or one does not take its state; names them.
        """
        if "script" in moments:
            self._require_same_objects(snapshot)
        for moment in moments:
            for entry in self._at(moment):
                entry.restore(snapshot, moment)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Where much is restored: if that fails, all but models has the attributes again that it had before."""
        owners = {id(entry.owner): entry.owner for entry in [*self._at("early"), *self._at("behind")]}
        before = [(vars(owner), dict(vars(owner))) for owner in owners.values() if hasattr(owner, "__dict__")]
        try:
            yield
        except BaseException:
            for attributes, old in before:
                attributes.clear()
                attributes.update(old)
            raise

    def digests(self, snapshot: Snapshot, ignored: Collection[str]) -> dict[str, int]:
        """Return digests of the tensors of all compared objects, by name. Other values may be one worker's own.

        ``ignored`` are the names of those of which each worker keeps a different one.
        """
        digests = {}
        for entry in self._entries.values():
            if entry.compare and entry.checkpoint and entry.name not in ignored:
                tensors = flatten(kept(snapshot, *entry.place), name=entry.name)[1]
                if tensors:
                    digests[entry.name] = combined(sums_of_words([tensors[name] for name in sorted(tensors)]))
        return digests

    def places(self, snapshot: Snapshot, names: Collection[str]) -> dict[str, int]:
        """Return digests of single tensors of some objects, by where they are in their states."""
        entries = [entry for entry in self._entries.values() if entry.name in names]
        trees = [flatten(kept(snapshot, *entry.place), name=entry.name)[1] for entry in entries]
        return {path: combined(sums_of_words([tensor])) for tree in trees for path, tensor in tree.items()}

    def _at(self, moment: Moment) -> list[Entry]:
        return [entry for entry in self._entries.values() if moment in entry.when]

    def _require_same_objects(self, snapshot: Snapshot) -> None:
        states = kept(snapshot, *REGISTERED)
        if not isinstance(states, dict):
            raise CheckpointError(f"the checkpoint of step {snapshot.step} has no states of registered objects by name")
        ours = {entry.name: entry for entry in self._entries.values() if entry.is_registered}
        missing = [name for name in states if name not in ours and not name.startswith(OWN)]
        unknown = [name for name, entry in ours.items() if name not in states and not entry.may_lack]
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} and the script registered different objects: "
                f"only in the checkpoint {missing or 'none'}, only in the script {unknown or 'none'}"
            )


# The comparison of objects between workers.


@dataclass(frozen=True, slots=True)
class Differing:
    """The registered objects that differ between workers.

    Attributes:
        new: their digests, by step and name, each with one digest per rank.
        again: names of those that differed in the same way before the run went back: the script wants it so.
    """

    new: dict[str, list[int]]
    again: list[str]

    @property
    def names(self) -> list[str]:
        """The names of all of them."""
        return [*(place.partition(" ")[2] for place in self.new), *self.again]


def differing(step: int, reports: Sequence[tuple[dict[str, int], dict[str, list[int]]]]) -> Differing:
    """Return the objects that differ between workers after so many steps."""
    before = {place: digests for _, own in reports for place, digests in own.items()}
    held = {name: [own[name] for own, _ in reports] for name in reports[0][0] if all(name in own for own, _ in reports)}
    differ = {name: digests for name, digests in held.items() if len(set(digests)) > 1}
    again = [name for name, digests in differ.items() if before.get(f"{step} {name}") == digests]
    return Differing({f"{step} {name}": digests for name, digests in differ.items() if name not in again}, again)
