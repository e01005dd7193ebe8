"""The state that a run keeps of guests: trainings, callbacks and other objects; and evaluations by workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from operator import is_
from typing import Any, TypeVar

from torch import Tensor, nn

from unisono.changes import Memento
from unisono.checkpoint.codec import can_keep, flatten
from unisono.errors import CheckpointError
from unisono.host.tracebacks import warn
from unisono.reachable import ABSENT
from unisono.train.loop.evaluation import Evaluation
from unisono.train.run import Run
from unisono.train.state.registry import kept

T = TypeVar("T")


@contextmanager
def put(thing: Any, name: str, value: Any) -> Iterator[None]:
    """An object has another attribute or method in here, by itself: others of its class have their own."""
    has_own, before = name in vars(thing), vars(thing).get(name)
    vars(thing)[name] = value
    try:
        yield
    finally:
        if has_own:
            vars(thing)[name] = before
        else:
            del vars(thing)[name]


def are_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists have the very same objects: a run that is prepared for some has to be told of others."""
    return len(objects) == len(others) and all(map(is_, objects, others))


def register(run: Run, guest: str, thing: Any) -> str:
    """Have the run keep an object, under a name that nothing has yet: there may be several models or trainers.

    Return the name.
    """
    taken = run.inside.trained.registry.objects
    numbered = (f"{guest} {number}" for number in range(2, len(taken) + 3))
    name = next(name for name in (guest, *numbered) if name not in taken)
    run.register(name, thing)
    return name


def evaluate(run: Run, action: Callable[[Evaluation], T], data: Any, batch_size: int | None = None) -> T:
    """Evaluate together with all workers, each a part of the batches. ``batch_size`` is None if a loader says it."""
    run.inside.synchronisation.before_call()
    return run.inside.evaluator.carry_out(action, data, batch_size, None)


MOST_BYTES = 2**24
"""Of tensors and arrays that are copied before a batch is evaluated."""


class BatchTrace:
    """Puts back what evaluating a batch has changed of objects, since workers evaluate different batches.

    Everything that can be reached counts, but for weights, what the run keeps, and what clocks show. Buffers that were
    written count as well; :func:`~unisono.train.loop.evaluation.evaluating` puts them back.

    Args:
        run: the run.
        modules: the modules whose buffers count.
        known: objects that are put back by somebody else.

    Attributes:
        paths: the paths of what has changed, once that is known.
    """

    def __init__(self, run: Run, modules: Iterable[nn.Module], known: Iterable[Any] = ()) -> None:
        self._states, self._known, self.paths = run.inside.states, tuple(known), list[str]()
        layers = [layer for module in modules for layer in module.modules()]
        self._buffers = [
            (layer._buffers, name, tensor, _version(tensor))
            for layer in layers
            for name, tensor in layer._buffers.items()
        ]
        self._look = self._states.look(self._known, has_data=False)
        self._memento = Memento((place for place, _ in self._look.places.values()), MOST_BYTES)

    def is_clean(self) -> bool:
        """Whether nothing has changed; else all is put back, and what cannot be is named."""
        is_written = any(
            buffers.get(name) is not tensor or _version(tensor) != version
            for buffers, name, tensor, version in self._buffers
        )
        later = self._states.look(self._known, has_data=False)
        changes = [change for change in self._look.changed_until(later) if not change.is_clock]
        self.paths = [change.path for change in changes]
        for change in changes:
            before = self._look.places.get(change.path)
            if before is None or before[0].holder is not change.place.holder:  # an attribute that has come since
                change.place.put(ABSENT)
        if changes:
            self._memento.restore()
        for path in self._memento.unkept.intersection(self.paths):
            self._states.tell(path, LOST.format(path=path), breaks=False)
        return not changes and not is_written


LOST = (
    "{path} changes when a batch is evaluated, and cannot be put back. Each worker evaluates all batches from now on, "
    "behind one batch that counts twice"
)


def _version(tensor: Tensor | None) -> int:
    """The number of writes to a buffer that torch has counted."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


# The trainings of a script.


class Trainings:
    """The trainings of a script, one after the other, as checkpoints and other workers get them.

    Each has ``state()``, ``load(state)``, and ``go_on(state)`` where it is to go on in its middle.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.begun = run, list[Any]()
        self._name = ""
        self._awaited: dict[int, Mapping[str, Any]] = {}

    def register(self, guest: str, thing: Any) -> None:
        """Have the run keep an object, which tells the states of these trainings as ``fits``; once."""
        self._name = self._name or register(self.run, guest, thing)

    @property
    def restored(self) -> Mapping[str, Any]:
        """The state of that object with which the run has resumed; empty without one."""
        snapshot = self.run.inside.trained.restored
        return {} if snapshot is None else kept(snapshot, "registered").get(self._name, {})

    def add(self, training: Any) -> None:
        """Note that a training has begun; if there is a restored state of it, it goes on from there."""
        self.begun.append(training)
        if (state := self._awaited.pop(len(self.begun) - 1, None)) is not None:
            training.go_on(state)

    def recall(self) -> None:
        """Restore the state of the newest training, which was over where the run goes on."""
        states = self.restored.get("fits", [])
        if len(self.begun) <= len(states):
            self.begun[-1].load(states[len(self.begun) - 1])

    def state(self) -> list[Any]:
        """The states of all."""
        return [training.state() for training in self.begun]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Set the states of all trainings; that of a training that this worker has yet to begin waits for that."""
        for number, state in enumerate(states):
            if number < len(self.begun):
                self.begun[number].go_on(state)
            else:
                self._awaited[number] = state


# Callbacks that all workers call.


class KeptCallbacks:
    """The states of the callbacks of a training.

    ``framework`` is the package whose own callbacks are known to need no warning.
    """

    def __init__(self, owner: str, callbacks: Iterable[KeptAttributes], framework: str) -> None:
        self._owner, self._callbacks = owner, list(callbacks)
        for callback in self._callbacks:
            callback.warn(framework)

    @property
    def _names(self) -> list[str]:
        return [type(callback.thing).__name__ for callback in self._callbacks]

    def state(self) -> list[list[Any]]:
        """The name and the state of each."""
        return [[name, callback.state()] for name, callback in zip(self._names, self._callbacks, strict=True)]

    def outline(self) -> list[list[Any]]:
        """Return the states without arrays."""
        return [[name, callback.outline()] for name, callback in zip(self._names, self._callbacks, strict=True)]

    def require_alike(self, state: Sequence[Sequence[Any]]) -> None:
        """Refuse a state of other callbacks.

        Raises:
            CheckpointError: it is one; names them.
        """
        here, there = ", ".join(self._names), ", ".join(name for name, _ in state)
        if here != there:
            raise CheckpointError(f"{self._owner} has the callbacks {here}, and its state is of {there}: use the same")

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Have them know it; one that says itself what its state is may be left out of an outline."""
        for callback, (_, attributes) in zip(self._callbacks, state, strict=True):
            if attributes is not None:
                callback.load(attributes)


class KeptAttributes:
    """The state of an object that all workers call: its attributes that have changed since it was looked at first.

    Of an object with ``state_dict`` and ``load_state_dict``, these decide what the state is. ``skipped`` are attributes
    that belong to the framework.
    """

    def __init__(self, thing: Any, skipped: Collection[str] = ()) -> None:
        self.thing, self._skipped = thing, skipped
        self._base = {} if self._is_stateful else deepcopy(self._plain())

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self.thing, "state_dict") and hasattr(self.thing, "load_state_dict")

    def state(self) -> dict[str, Any]:
        """Return the attributes that have changed."""
        if self._is_stateful:
            return dict(self.thing.state_dict())
        plain = self._plain()
        changed = {name for name, value in plain.items() if name not in self._base or not same(value, self._base[name])}
        return {name: deepcopy(plain[name]) for name in sorted(changed)}

    def outline(self) -> dict[str, Any] | None:
        """Return the state without values that have arrays, which may be large.

        Return None if the object has ``state_dict``, and there are arrays in it.
        """
        state = self.state()
        plain = {name: value for name, value in state.items() if not flatten(value)[1]}
        return None if self._is_stateful and len(plain) < len(state) else plain

    def load(self, state: Mapping[str, Any]) -> None:
        """Set these attributes; all other attributes become as they were at first."""
        if self._is_stateful:
            self.thing.load_state_dict(state)
            return
        for name, value in deepcopy({**self._base, **state}).items():
            setattr(self.thing, name, value)

    def warn(self, of_framework: str) -> None:
        """Warn of attributes that cannot be kept.

        ``of_framework`` is the package whose own objects are known to need none.
        """
        kind = type(self.thing)
        if self._is_stateful or kind.__module__.startswith(f"{of_framework}."):
            return
        plain = self._plain()
        lost = [
            name
            for name, value in vars(self.thing).items()
            if name not in plain and name not in self._skipped and not callable(value)
        ]
        if lost:
            warn(
                f"the callback {kind.__name__} has {', '.join(sorted(lost))}, which checkpoints and workers that join "
                f"do not get: keep numbers, text, lists, dicts and arrays there, or give it state_dict and "
                f"load_state_dict",
            )

    def _plain(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self.thing).items() if name not in self._skipped and can_keep(value)
        }


def same(first: Any, second: Any) -> bool:
    """Whether two plain values are the same, bit for bit."""
    (tree, tensors), (second_tree, second_tensors) = flatten(first), flatten(second)
    return (
        tree == second_tree
        and tensors.keys() == second_tensors.keys()
        and all(bool((tensors[name] == second_tensors[name]).all()) for name in tensors)
    )
