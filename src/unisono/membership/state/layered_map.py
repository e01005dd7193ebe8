"""A mapping as a value, of whose thousands of entries one may change, or all of them at once."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar, overload

V = TypeVar("V")
D = TypeVar("D")

_GONE: Any = object()

FEW = 128
"""Entries that may be above the others."""


class LayeredMap(Mapping[str, V]):
    """A mapping that never changes. One with other entries shares with it what is alike.

    It is two plain dicts, neither of which anybody changes. Below is a large one that many maps share, above a small
    one with what has changed since. One entry costs a copy of the small one, and now and then of the large one: less
    than in a persistent map, up to some 10^5 entries. Many entries, and look-ups, cost a tenth.

    Args:
        entries: the entries. None is no value.
    """

    __slots__ = ("_above", "_below", "_count", "_plain")

    def __init__(self, entries: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        self._below: dict[str, V] = dict(entries)
        self._plain: dict[str, V] | None = self._below
        self._above: dict[str, V] = {}
        self._count = len(self._below)

    def put(self, name: str, value: V) -> Self:
        """The map with this entry."""
        return self._with({**self._above, name: value}, self._count + (name not in self))

    def update(self, entries: Mapping[str, V]) -> Self:
        """The map with these entries."""
        if len(entries) > FEW:
            return type(self)({**self.plain(), **entries})
        return self._with({**self._above, **entries}, self._count + sum([name not in self for name in entries]))

    def drop(self, name: str) -> Self:
        """The map without an entry, which may not be there."""
        return self._with({**self._above, name: _GONE}, self._count - 1) if name in self else self

    def of(self, names: Collection[str]) -> list[V | None]:
        """The value of each name; None where there is none."""
        are_few = self._plain is None and len(names) < FEW
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
        found = self._above.get(name)
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

    def _with(self, above: dict[str, V], count: int) -> Self:
        found = object.__new__(type(self))
        found._below, found._above, found._count, found._plain = self._below, above, count, None
        return found if len(above) <= FEW else type(self)(found.plain())
