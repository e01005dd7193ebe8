"""Plain values in the attributes of an object: where they are, what they were, and how they have changed since."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import islice
from numbers import Number
from operator import is_
from typing import Any

import numpy as np

from unisono.reachable import ABSENT, is_script_class

Path = tuple[Any, ...]
"""The keys that lead to a place: an attribute, then keys of dicts, numbers of items, and attributes of meters."""

Change = list[Any]
"""A change of a place: its path, a word, and the value for that.

The words are ``add``, ``append``, ``set``, ``drop``; and ``refer`` and ``put``, where a number that was counted up
elsewhere is the value or the key.
"""

PLAIN = (
    *(Number, str, bytes, list, tuple, dict, deque, set, frozenset, np.generic, np.ndarray),
    *(bytearray, timedelta),  # of which others cannot be told: that is said
)
"""Kinds of values whose changes count."""

SHORT, LONG = 16, 1024
"""The items of a list that are places of their own, up to this many, and those of which only the last is compared."""


class CountedNumber:
    """A number that knows what was added to it: a plain one does not tell whether it was counted up or assigned.

    Attributes:
        origin: the path of the place where it lay.
        added: what was added to it since.
    """

    origin: Path
    added: tuple[float, ...]

    def __add__(self, other: Any) -> Any:
        other = number_of(other.item() if isinstance(other, np.generic) else other)
        if not isinstance(other, int | float):
            return NotImplemented
        return counted(number_of(self) + other, self.origin, (*self.added, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        other = other.item() if isinstance(other, np.generic) else other
        return self + -other if isinstance(other, int | float) else NotImplemented


class _Int(CountedNumber, int):
    pass


class _Float(CountedNumber, float):
    pass


def counted(value: float, origin: Path, added: tuple[float, ...] = ()) -> Any:
    """A number that counts what is added to it."""
    number = _Int(value) if isinstance(value, int) else _Float(value)
    number.origin, number.added = origin, added
    return number


def number_of(value: Any) -> Any:
    """A counted number without its additions; other values as they are."""
    match value:
        case _Int():
            return int(value)
        case _Float():
            return float(value)
    return value


def plain(value: Any) -> Any:
    """A copy of a value in which no number is counted; dicts of all classes and meters become plain dicts."""
    if type(value) is deque:
        return deque(map(plain, value), value.maxlen)
    if isinstance(value, list) or type(value) is tuple:
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    value = vars(value) if is_meter(value) else value
    if isinstance(value, dict):
        return {number_of(key): plain(part) for key, part in value.items()}
    return number_of(value)


def restore(holder: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    """Set plain values in a dict. Lists, dicts and meters in it stay the same objects, and have what the values say."""
    for key, value in values.items():
        held = held_at(holder, key)
        if value is ABSENT:
            holder.pop(key, None)
            continue
        if isinstance(value, dict) and (isinstance(held, dict) or is_meter(held)):
            inner = inside(held)
            for gone in inner.keys() - value.keys():
                del inner[gone]
            restore(inner, value)
        elif isinstance(held, list | deque) and type(held) is type(value):
            held.clear()
            held.extend(plain(value))
        else:
            holder[key] = plain(value)


# The places of an object.


def is_meter(value: Any) -> bool:
    """Whether a value is a small object of the script's own, which adds something up."""
    kind: type = type(value)
    return hasattr(value, "__dict__") and not isinstance(value, type) and _is_meter_class(kind)


@cache
def _is_meter_class(kind: type) -> bool:
    names = {name for base in kind.__mro__ for name in vars(base)}
    return is_script_class(kind) and not names & {"__getitem__", "__iter__", "__len__", "__call__", "state_dict"}


def inside(value: Any) -> Any:
    """The collection that has what is inside of a value: itself, or the attributes of a meter."""
    return value if isinstance(value, dict | list) else vars(value)


def held_at(holder: Any, key: Any) -> Any:
    """What a collection has under a key; :data:`ABSENT` if it has nothing there."""
    if isinstance(holder, dict):
        return dict.get(holder, key, ABSENT)  # a defaultdict makes nothing
    return holder[key] if key < len(holder) else ABSENT


@dataclass(slots=True)
class PlainPlace:
    """A place as it was at one time.

    Attributes:
        holder: the collection that has it under the last key of the path.
        present: what lies there in place of ``value``: a counted number.
        items: the items of a list; of a long one the last one.
        is_again: whether what lies there lies in an earlier place, too, which has its changes.
        is_open: whether what is inside of it has places of its own.
    """

    path: Path
    holder: Any
    value: Any
    present: Any
    items: list[Any] = field(default_factory=list)
    length: int = 0
    is_again: bool = False
    is_open: bool = False

    @classmethod
    def of(cls, path: Path, holder: Any) -> PlainPlace:
        """The place as it is now."""
        value = held_at(holder, path[-1])
        place = cls(path, holder, value, value)
        place.note_items()
        return place

    def note_items(self) -> None:
        """Note the items that the list has now."""
        if isinstance(self.value, dict):
            self.length = len(self.value)
        elif isinstance(self.value, list | deque) and not self.is_again:
            self.length = len(self.value)
            self.items = list(self.value) if self.length <= LONG else [self.value[-1]]

    def count(self) -> None:
        """Have a number count what is added to it."""
        value = self.value.item() if isinstance(self.value, np.number) else self.value
        if type(value) in (int, float):
            self.present = self.holder[self.path[-1]] = counted(value, self.path)

    def end_count(self) -> None:
        """Have a plain number there again."""
        if isinstance(now := held_at(self.holder, self.path[-1]), CountedNumber):
            self.holder[self.path[-1]] = number_of(now)

    def put_back(self) -> None:
        """Have it so again."""
        value, key = self.value, self.path[-1]
        if value is ABSENT:
            self.holder.pop(key, None)
            return
        if isinstance(value, list | deque) and not self.is_again:
            if self.length > LONG:
                while len(value) > self.length:
                    value.pop()
            else:
                value.clear()
                value.extend(self.items)
        if isinstance(self.holder, dict) or key < len(self.holder):
            self.holder[key] = self.present

    def appended(self, now: Any) -> list[Any] | None:
        """The items that have come behind those of that time; None if those are not there any more."""
        if self.length > LONG:
            is_longer = len(now) >= self.length and now[self.length - 1] is self.items[0]
            return list(islice(reversed(now), len(now) - self.length))[::-1] if is_longer else None
        others = list(now)
        for gone in range(1 + len(self.items) * isinstance(now, deque)):  # a full deque drops its first ones
            kept = self.items[gone:]
            if len(others) >= len(kept) and all(map(is_, kept, others)):
                return others[len(kept) :]
        return None


# How a place has changed.


class Fresh(list[Any]):
    """A list that a dict has made for a key which it did not have: what is in it was appended, and not assigned."""


@contextmanager
def lists_marked(places: Iterable[PlainPlace]) -> Iterator[None]:
    """Have dicts that make lists make such ones within the context."""
    dicts = [p.value for p in places if isinstance(p.value, defaultdict) and p.value.default_factory is list]
    for each in dicts:
        each.default_factory = Fresh
    try:
        yield
    finally:
        for each in dicts:
            each.default_factory = list


def change_of(place: PlainPlace, now: Any) -> Change | None:
    """The change of a place that has another value now."""
    path, before = place.path, place.value
    if now is ABSENT:
        return [path, "drop", None]
    if place.is_again and now is before:
        return None
    if isinstance(now, CountedNumber) and now.origin == path:
        return [path, "add", list(now.added)] if now.added else None
    if isinstance(before, list | deque) and type(now) is type(before):
        is_short = isinstance(now, list) and len(now) <= 2 * SHORT
        own = (
            [place.items[at] if _is_item(item, path, at) else item for at, item in enumerate(now)] if is_short else now
        )
        if (items := place.appended(own)) is not None:
            return [path, "append", plain(items)] if items else None
    is_equal = type(now) is type(before) and isinstance(now, bool | str | bytes | tuple) and now == before
    return None if now is place.present or is_equal or not _is_plain(now) else [path, "set", plain(now)]


def _is_item(value: Any, path: Path, at: int) -> bool:
    """Whether an item of a list is the number that was there, with what was added to it."""
    return isinstance(value, CountedNumber) and value.origin == (*path, at)


def new_change(holder: dict[Any, Any], path: Path, key: Any) -> Change | None:
    """The change of a place that the shard has made, under a key that may be a counted number."""
    value = holder[key]
    if isinstance(key, CountedNumber):
        return [path, "put", [list(key.origin), list(key.added), plain(value)]] if _is_plain(value) else None
    begins = int if isinstance(holder, Counter) else getattr(holder, "default_factory", None)
    if isinstance(value, Fresh) or (isinstance(value, list) and begins is None):
        return [path, "append", plain(value)] if value else None
    if begins in (int, float) and isinstance(value, int | float):
        return [path, "add", [number_of(value)]]
    return [path, "set", plain(value)] if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, PLAIN)


def references_in(path: Path, value: Any) -> Iterator[Change]:
    """Numbers of what was assigned that were counted up elsewhere: other shards' additions belong to them."""
    if isinstance(value, CountedNumber):
        yield [path, "refer", [list(value.origin), list(value.added)]]
    elif isinstance(value, list | dict):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from references_in((*path, key), value[key])


def holder_of(thing: Any, path: Sequence[Any]) -> Any:
    """The collection that has a place; None if there is none any more."""
    holder = vars(thing)
    for key in path[:-1]:
        if (value := held_at(holder, key)) is ABSENT:
            return None
        holder = inside(value)
    return holder
