"""Other people's objects: what is kept of them, under which name, and attributes that are others for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from warnings import warn

from unisono.checkpoint.codec import flatten
from unisono.errors import CheckpointError, UnisonoWarning
from unisono.train.run import Run


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


def free_name(run: Run, guest: str) -> str:
    """A name that nothing registered has yet: there may be several models or trainers.

    Args:
        run: the run.
        guest: the name of the framework.
    """
    taken = run.inside.trained.registered
    numbered = (f"{guest} {number}" for number in range(2, len(taken) + 3))
    return next(name for name in (guest, *numbered) if name not in taken)


class KeptAttributes:
    """The state of an object that all workers call: its attributes that have changed since it was looked at first.

    An object with ``state_dict`` and ``load_state_dict`` says itself what that is.

    Args:
        thing: the object, such as a callback, as a training begins.
        skipped: the names of attributes that belong to the framework.

    Attributes:
        thing: the object.
    """

    def __init__(self, thing: Any, skipped: Collection[str] = ()) -> None:
        self.thing, self._skipped = thing, skipped
        self._base = {} if self._says_itself else deepcopy(self._plain())

    @property
    def _says_itself(self) -> bool:
        return hasattr(self.thing, "state_dict") and hasattr(self.thing, "load_state_dict")

    def state(self) -> dict[str, Any]:
        """What has changed."""
        if self._says_itself:
            return dict(self.thing.state_dict())
        plain = self._plain()
        changed = {name for name, value in plain.items() if name not in self._base or not same(value, self._base[name])}
        return {name: deepcopy(plain[name]) for name in sorted(changed)}

    def outline(self) -> dict[str, Any] | None:
        """The same without values that have arrays, which may be large.

        Returns:
            the state; None if the object says itself what that is, and there are arrays in it.
        """
        state = self.state()
        found = {name: value for name, value in state.items() if not flatten(value)[1]}
        return None if self._says_itself and len(found) < len(state) else found

    def load(self, state: Mapping[str, Any]) -> None:
        """Have that again; everything else is as it was at first."""
        if self._says_itself:
            self.thing.load_state_dict(state)
            return
        for name, value in deepcopy({**self._base, **state}).items():
            setattr(self.thing, name, value)

    def warn(self, of_framework: str) -> None:
        """Warn of attributes that cannot be kept.

        Args:
            of_framework: the name of the package whose own objects are known to need none.
        """
        kind = type(self.thing)
        if self._says_itself or kind.__module__.startswith(f"{of_framework}."):
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
                UnisonoWarning,
                stacklevel=2,
            )

    def _plain(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self.thing).items() if name not in self._skipped and _is_kept(value)
        }


def same(one: Any, other: Any) -> bool:
    """Whether two plain values are the same, bit for bit."""
    (tree, tensors), (other_tree, other_tensors) = flatten(one), flatten(other)
    return (
        tree == other_tree
        and tensors.keys() == other_tensors.keys()
        and all(bool((tensors[name] == other_tensors[name]).all()) for name in tensors)
    )


def _is_kept(value: Any) -> bool:
    try:
        flatten(value)
    except CheckpointError:
        return False
    return True
