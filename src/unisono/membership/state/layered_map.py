"""A mapping as a value, of whose thousands of entries one may change, or all of them at once."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar, overload

from rpds import HashTrieMap

V = TypeVar("V")
D = TypeVar("D")

_GONE: Any = object()

FEW = 16
"""Entries that a plain dict is not copied for, however small it is."""

SHARE = 16
"""Of so many entries no more than one is changed above the plain dict."""


class LayeredMap(Mapping[str, V]):
    """A mapping that never changes. One with other entries shares with it what is alike.

    Below is a plain dict that many maps share, and that nobody changes. Above are the few entries that have changed
    since, in a persistent map. A dict is looked up and copied ten times as fast as a persistent map; one entry above it
    costs O(log n).

    Args:
        entries: the entries.
    """

    __slots__ = ("_above", "_below", "_count", "_plain")

    def __init__(self, entries: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        self._below: dict[str, V] = dict(entries)
        self._plain: dict[str, V] | None = self._below
        self._above: HashTrieMap[str, V] = HashTrieMap()
        self._count = len(self._below)

    def put(self, name: str, value: V) -> Self:
        """The map with this entry."""
        return self._with(self._above.insert(name, value), self._count + (name not in self))

    def update(self, entries: Mapping[str, V]) -> Self:
        """The map with these entries."""
        if self._is_much(len(self._above) + len(entries)):
            return type(self)({**self.plain(), **entries})
        return self._with(self._above.update(entries), self._count + sum(name not in self for name in entries))

    def drop(self, name: str) -> Self:
        """The map without an entry, which may not be there."""
        if name not in self:
            return self
        above = self._above.insert(name, _GONE) if name in self._below else self._above.remove(name)
        return self._with(above, self._count - 1)

    def of(self, names: Collection[str]) -> list[V | None]:
        """The value of each name; None where there is none."""
        are_few = self._plain is None and len(names) * SHARE < self._count
        return [*map(self.get if are_few else self.plain().get, names)]

    def plain(self) -> Mapping[str, V]:
        """All entries, as a plain dict to be looked at."""
        if self._plain is None:
            self._plain = {**self._below, **self._above}
            if len(self._plain) > self._count:
                for name in [name for name, value in self._above.items() if value is _GONE]:
                    del self._plain[name]
        return self._plain

    @overload
    def get(self, name: str, /) -> V | None: ...
    @overload
    def get(self, name: str, /, default: V | D) -> V | D: ...
    def get(self, name: str, /, default: Any = None) -> Any:
        """The value of a name."""
        found = self._above.get(name) if self._above else None
        if found is None:
            return self._below.get(name, default)
        return default if found is _GONE else found

    def __getitem__(self, name: str) -> V:
        found = self.get(name, _GONE)
        if found is _GONE:
            raise KeyError(name)
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name, _GONE) is not _GONE

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain())

    def items(self) -> Any:
        """Names and values."""
        return self.plain().items()

    def values(self) -> Any:
        """The values."""
        return self.plain().values()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self.plain() == dict(other)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plain()})"

    def _is_much(self, changed: int) -> bool:
        return changed > FEW and changed * SHARE > len(self._below)

    def _with(self, above: "HashTrieMap[str, V]", count: int) -> Self:
        found = type(self).__new__(type(self))
        found._below, found._above, found._count, found._plain = self._below, above, count, None
        return type(self)(found.plain()) if self._is_much(len(above)) else found
