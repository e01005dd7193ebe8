"""What has changed between two looks at the plain state that can be reached from objects."""

from __future__ import annotations

import itertools
import random
import re
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from types import GeneratorType
from typing import Any, Literal

import numpy as np
import torch

from unisono.reachable import ABSENT, CONTAINERS, DEEPEST, MOST_ITEMS, Place, items_of, places_in

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
"""Kinds of random generators that a script may keep."""

MOST_BYTES = 2**16
"""Bytes of an array or a text that are compared: of longer ones, as many that lie evenly."""

Kind = Literal["generator", "position", "number", "text", "tensor", "value", "record"]
"""What has changed: ``record`` is a list or a mapping to which numbers or texts were added."""

Signature = tuple[Any, ...]
"""A value in short, to be compared with itself later: its kind first."""

_CLOCKS = (time.time, time.perf_counter, time.monotonic)

_NUMBERS = frozenset((bool, int, float))

CLOCKS = re.compile(r"(^|_)(t|time|times|clock|elapsed|duration|seconds|timer|tic|toc)(_|$)")
"""Names of what clocks show."""

KNOWN_NAMES = re.compile(
    CLOCKS.pattern + r"|(^|_)(hits|misses|reads?|cached?|logs?|logged|printed|progress|pbar|bar)(_|$)"
)
"""Names of attributes that decide nothing: clocks, caches, counters of log lines."""

OF_PROCESS = re.compile(
    r"(^|_)(rank|ranks|pid|host|hostname|port|worker|device|gpu|node|process|main|master|uuid|id)(_|$)"
)
"""Names of what each process has of its own."""

KNOWN_OWNERS = re.compile(
    r"(Meter|Metric|Metrics|Tracker|Logger|Log|Timer|Stopwatch|Clock|Progress|ProgressBar|Recorder|Writer|Monitor|"
    r"Profiler|History|Stats|Statistics|Cache)$"
)
"""Names of classes whose objects decide nothing."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A place whose value has changed.

    Attributes:
        kind: what the value is.
        is_first: whether there was nothing before, or an empty list or mapping.
        was_there: whether the place was there.
        old: the number or text that was there; :data:`~unisono.reachable.ABSENT` if it was something else.
    """

    path: str
    place: Place
    kind: Kind
    is_first: bool = False
    was_there: bool = True
    old: Any = ABSENT

    @property
    def is_known(self) -> bool:
        """Whether its name, or that of its class, is one of those that decide nothing."""
        return bool(KNOWN_NAMES.search(self._name) or KNOWN_OWNERS.search(self.place.owner))

    @property
    def is_clock(self) -> bool:
        """Whether its name is that of what a clock shows."""
        return bool(CLOCKS.search(self._name))

    @property
    def can_be_undone(self) -> bool:
        """Whether it is known what was there: nothing, an empty list or mapping, a number or a text."""
        return self.is_first or self.old is not ABSENT

    def undo(self) -> None:
        """Put back what was there."""
        value = self.place.value
        if self.old is not ABSENT:
            self.place.put(self.old)
        elif self.was_there and isinstance(value, dict | set | list | deque):
            _clear(value)
        else:
            self.place.put(None if self.was_there else ABSENT)

    @property
    def is_of_process(self) -> bool:
        """Whether its name is that of what processes have of their own: a rank, a host, a port."""
        return bool(OF_PROCESS.search(self._name))

    @property
    def _name(self) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.path.rpartition(".")[2]).lower()


FAR = 1_000_003
"""A number beyond what scripts wait for, and no multiple of what they count by."""


def enlarge(changes: Iterable[Changed]) -> None:
    """Make numbers far larger: what waits for a count begins."""
    for changed in changes:
        value = changed.place.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            changed.place.put(value + FAR)


class Look:
    """A look at the plain state that can be reached from some objects.

    Attributes:
        places: each place by path, with its value in short.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        is_known: Callable[[Any], bool] = lambda thing: False,
        is_left_out: Callable[[Place], bool] = lambda place: False,
    ) -> None:
        self._alive: list[Any] = []  # or another object could get the identity of one that is gone
        self._clocks = [clock() for clock in _CLOCKS]
        self.places: dict[str, tuple[Place, Signature]] = {}
        for place in places_in(roots, is_known):
            if not is_left_out(place):
                path, number = place.path, 2
                while path in self.places:
                    path, number = f"{place.path} ({number})", number + 1
                self.places[path] = place, self._short(place.value, 0)

    def let_go(self) -> None:
        """Let go of the objects that were seen. One that takes the place of another may then pass for it."""
        self._alive.clear()

    def changed_until(self, later: Look) -> Iterator[Changed]:
        """The places that are other ones at a later look; those that have come since, too."""
        for path, (place, new) in later.places.items():
            _, old = self.places.get(path, (place, ("nothing",)))
            if old == new or self._is_clock(new, later):
                continue
            if (kind := _kind(old, new)) is not None:
                is_first = old[0] == "nothing" or _is_empty(old)
                is_there = path in self.places
                yield Changed(path, place, kind, is_first=is_first, was_there=is_there, old=_value_of(old))

    def _is_clock(self, new: Signature, later: Look) -> bool:
        """Whether a number is what a clock showed between the looks."""
        if new[0] != "number" or not isinstance(new[1], float):
            return False
        return any(before <= new[1] <= after for before, after in zip(self._clocks, later._clocks, strict=True))

    def _short(self, value: Any, depth: int) -> Signature:
        if type(value) in _NUMBERS and value == value:  # most are
            return ("number", value)
        if value is None or value is ABSENT:
            return ("nothing",)
        if isinstance(value, bool | int | float | complex | np.generic):
            number = value.item() if isinstance(value, np.generic) else value
            return ("number", number if number == number else repr(number))
        if isinstance(value, str | bytes | bytearray):
            return ("text", len(value), value[:MOST_BYTES])
        if isinstance(value, torch.Tensor):
            self._alive.append(value)
            return ("tensor", id(value), 0 if value.is_inference() else value._version)
        if isinstance(value, np.ndarray):
            self._alive.append(value)
            return ("tensor", value.shape, value.dtype.str, 0 if value.dtype.hasobject else _sum_of(value))
        if isinstance(value, GENERATORS):
            return ("generator", state_of(value))
        if isinstance(value, CONTAINERS):
            return self._short_container(value, depth)
        if (position := _position(value)) is not None:
            return ("position", position)
        self._alive.append(value)
        return ("object", id(value))

    def _short_container(self, value: Any, depth: int) -> Signature:
        if depth >= DEEPEST:
            return ("list", len(value), ())
        items = items_of(value)
        if isinstance(value, dict):
            return ("mapping", len(value), {part: self._short(item, depth + 1) for part, item in items})
        if isinstance(value, set | frozenset):
            return ("list", len(value), frozenset(self._short(item, depth + 1)[:2] for _, item in items))
        return ("list", len(value), tuple(self._short(item, depth + 1) for _, item in items))


def _kind(old: Signature, new: Signature) -> Kind | None:
    """What has changed; None for what is no state."""
    match new[0]:
        case "nothing":
            return "value" if old[0] in ("tensor", "list", "mapping", "number", "text") else None
        case "object":
            return None  # what is in it is compared at its own places
        case "generator" | "position" | "number" | "text" | "tensor":
            kind: Kind = new[0]
            return kind
    if _is_record(old, new):
        return "record"
    return "tensor" if _holds_tensors(new) else "value"


def _is_record(old: Signature, new: Signature) -> bool:
    """Whether a list or a mapping has only got more numbers or texts."""
    if new[0] != old[0] and old[0] != "nothing":
        return False
    before = old[2] if old[0] == new[0] else type(new[2])()
    if isinstance(new[2], dict):
        return all(new[2].get(part) == item for part, item in before.items()) and all(
            _is_plain(item) for part, item in new[2].items() if part not in before
        )
    if isinstance(new[2], frozenset):
        return before <= new[2] and all(map(_is_plain, new[2] - before))
    same = min(len(before), MOST_ITEMS)
    return (
        new[1] >= (old[1] if old[0] == new[0] else 0)
        and new[2][:same] == before[:same]
        and all(map(_is_plain, new[2][same:]))
    )


def _value_of(short: Signature) -> Any:
    """The number or the whole text that a signature stands for; :data:`~unisono.reachable.ABSENT` of all else."""
    if short[0] == "number" and not isinstance(short[1], str):  # NaN is a text there
        return short[1]
    return short[2] if short[0] == "text" and isinstance(short[2], str) and len(short[2]) == short[1] else ABSENT


def _is_plain(short: Signature) -> bool:
    if short[0] in ("number", "text", "nothing"):
        return True
    return short[0] == "list" and len(short) > 2 and all(map(_is_plain, short[2]))


def _holds_tensors(short: Signature) -> bool:
    if short[0] in ("list", "mapping") and len(short) > 2:
        items = short[2].values() if isinstance(short[2], dict) else short[2]
        return any(_holds_tensors(item) for item in items)
    return bool(short[0] == "tensor")


def _is_empty(short: Signature) -> bool:
    return short[0] in ("list", "mapping") and not short[1]


def _sum_of(array: np.ndarray[Any, Any]) -> int:
    if array.nbytes <= MOST_BYTES:
        return zlib.crc32(np.ascontiguousarray(array).tobytes())
    step = -(-array.size * array.itemsize // MOST_BYTES)
    return zlib.crc32(np.ascontiguousarray(array.reshape(-1)[::step]).tobytes())


def state_of(generator: Any) -> int:
    """A checksum of the state of a random generator."""
    match generator:
        case np.random.Generator():
            state: Any = generator.bit_generator.state
        case torch.Generator():
            return zlib.crc32(generator.get_state().numpy().tobytes())
        case np.random.RandomState():
            kind, words, *rest = generator.get_state()
            state = [kind, np.asarray(words).tobytes(), *rest]
        case _:
            state = generator.getstate()
    return zlib.crc32(repr(state).encode())


def _position(value: Any) -> Any:
    """Where an iterator stands; None for what is none, or does not tell."""
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, GeneratorType):
        return getattr(value.gi_frame, "f_lasti", None)
    if type(value).__name__.endswith("iterator") and type(value).__module__ == "builtins":
        return length_hint(value, -1)
    return None


class Memento:
    """A copy of the values of some places, which can be put back. Objects that several places share stay shared.

    Args:
        places: the places.
        most_bytes: the most bytes of a tensor or an array that is copied.

    Attributes:
        unkept: the paths of places that cannot be put back, such as those of iterators.
    """

    def __init__(self, places: Iterable[Place], most_bytes: int = 2**26) -> None:
        self._most_bytes = most_bytes
        self._seen: set[int] = set()
        self._restores: list[tuple[str, Callable[[], object]]] = []
        self.unkept: set[str] = set()
        for place in places:
            value = place.value
            self._restores.append((place.path, partial(place.put, value)))
            try:
                self._keep(place.path, value)
            except Exception:  # noqa: BLE001 (tensors and containers of all kinds)
                self.unkept.add(place.path)

    @torch.no_grad()
    def restore(self) -> None:
        """Put all values back, with what they held; what fails is in :attr:`unkept` behind that."""
        for path, restore in self._restores:
            if path not in self.unkept:
                try:
                    restore()
                except Exception:  # noqa: BLE001 (likewise)
                    self.unkept.add(path)

    def _keep(self, path: str, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        parts: Iterable[Any] = ()
        match value:
            case torch.Tensor():
                if value.layout != torch.strided or value.nbytes > self._most_bytes:
                    raise UnkeptError
                self._note(
                    path, _set_tensor, value, value.detach().clone(), 0 if value.is_inference() else value._version
                )
            case np.ndarray():
                if value.nbytes > self._most_bytes:
                    raise UnkeptError
                if value.flags.writeable:
                    self._note(path, np.copyto, value, value.copy())
            case np.random.Generator():
                self._note(path, setattr, value.bit_generator, "state", value.bit_generator.state)
            case np.random.RandomState() | torch.Generator():
                self._note(path, value.set_state, value.get_state())
            case random.Random():
                self._note(path, value.setstate, value.getstate())
            case dict():
                self._note(path, _refill_dict, value, dict(value))
                parts = list(value.values())
            case set():
                self._note(path, _refill_set, value, set(value))
            case list():
                self._note(path, _refill_list, value, parts := list(value))
            case deque():
                self._note(path, _refill_deque, value, parts := list(value))
            case tuple() | frozenset():
                parts = value
            case _ if _position(value) is not None:
                raise UnkeptError
        for part in parts:
            self._keep(path, part)

    def _note(self, path: str, restore: Callable[..., object], *values: Any) -> None:
        self._restores.append((path, partial(restore, *values)))


def _set_tensor(target: torch.Tensor, value: torch.Tensor, version: int) -> None:
    """Give a tensor the values that it had, if anything was written to it, and the shape."""
    if not target.is_inference() and target._version == version:
        return
    if target.shape == value.shape:
        target.detach().copy_(value)
    else:
        target.data = value.clone()


# By the methods of the classes themselves: those that inherit from them may refuse.


def _refill_dict(target: dict[Any, Any], items: dict[Any, Any]) -> None:
    kind = OrderedDict if isinstance(target, OrderedDict) else dict  # it keeps its order beside dict's own
    kind.clear(target)
    kind.update(target, items)


def _refill_set(target: set[Any], items: set[Any]) -> None:
    set.clear(target)
    set.update(target, items)


def _refill_list(target: list[Any], items: list[Any]) -> None:
    list.__setitem__(target, slice(None), items)


def _refill_deque(target: deque[Any], items: list[Any]) -> None:
    deque.clear(target)
    deque.extend(target, items)


def _clear(target: Any) -> None:
    kind = next(kind for kind in (OrderedDict, dict, set, list, deque) if isinstance(target, kind))
    kind.clear(target)


class UnkeptError(Exception):
    """A value that cannot be copied and put back."""
