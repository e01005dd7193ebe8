"""Rows by id, as a value that never changes, and the index beside them; and the mapping in which they lie."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, overload

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from rpds import HashTrieMap, HashTrieSet

V = TypeVar("V")
D = TypeVar("D")

_GONE: Any = object()

FEW = 128
"""Entries that may be above the others."""


class LayeredMap(Mapping[str, V]):
    """A mapping that never changes. One with other entries shares with it what is alike.

    It is two plain dicts, neither of which anybody changes. Below is a large one that many maps share, above a small
    one with what has changed since. One entry costs a copy of the small one, and now and then of the large one: less
    than in a persistent map, up to some 10^5 entries. Many entries, and look-ups, cost a tenth. None is no value.
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
        value = self._above.get(name)
        if value is None:
            return self._below.get(name, default)
        return default if value is _GONE else value

    def __getitem__(self, name: str) -> V:
        value = self.get(name, _GONE)
        if value is _GONE:
            raise KeyError(name)
        return value

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
        new = object.__new__(type(self))
        new._below, new._above, new._count, new._plain = self._below, above, count, None
        return new if len(above) <= FEW else type(self)(new.plain())


# Rows and index.


class HasId(Protocol):
    """A row."""

    @property
    def id(self) -> str:
        """Its id, which no other row of its table has."""


Row = TypeVar("Row", bound=HasId)


class Table(Mapping[str, Row], Generic[Row]):
    """Rows by id, as a value. A table with another row shares nearly all with the one before: see ``LayeredMap``.

    Beside the rows stand the ids of the rows with each mark, and the sum of the rows' weights. A subclass says what
    marks and weights are. Rows and index change together, so whoever asks the index looks at no row.

    An open table is the one exception: it takes rows itself, and they get into rows and index together, when somebody
    asks for more than a row or a count, or when it is closed.
    """

    __slots__ = ("_came", "_marked", "_more", "_rows", "_taken", "weight")

    ROW: ClassVar[type]
    """The type of the rows."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: LayeredMap[Row] = LayeredMap()
        self._marked: HashTrieMap[Hashable, HashTrieSet[str]] = HashTrieMap()
        self.weight = 0
        self._taken: dict[str, Row] | None = None
        self._came: dict[Hashable, dict[str, bool]] = {}
        self._more: dict[Hashable, int] = {}
        self._open()
        for row in rows:
            self._take(self.get(row.id), row)
        self._settle()
        self._taken = None

    @classmethod
    def marks(cls, row: Row) -> tuple[Hashable, ...]:
        """The marks of a row."""
        raise NotImplementedError

    @classmethod
    def weigh(cls, row: Row) -> int:
        """The weight of a row."""
        return 0

    @classmethod
    def place(cls, row: Row) -> Any:
        """What rows are ordered by."""
        raise NotImplementedError

    # -- other tables

    def put(self, row: Row) -> Self:
        """The table with this row, in place of one with the same id. An open table is that table itself."""
        if self._taken is not None:
            self._take(self.get(row.id), row)
            return self
        return self._changed(self._rows.get(row.id), row)

    def drop(self, row: Row) -> Self:
        """The table without a row of this one's id. An open table is that table itself."""
        if self._taken is not None:
            self._settle()
            self._change(self._rows.get(row.id), None)
            return self
        return self._changed(self._rows.get(row.id), None)

    def opened(self) -> Self:
        """The same rows, as an open table: for many that change at once."""
        table = self.closed()
        table._open()
        return table

    def closed(self) -> Self:
        """The same rows, as a table that never changes."""
        self._settle()
        return self._copy()

    def with_rows(self, rows: Iterable[Row]) -> Self:
        """The table with these rows, each in place of one with the same id."""
        table = self.opened()
        for row in rows:
            table.put(row)
        return table.closed()

    # -- the index

    def count(self, *marks: Hashable) -> int:
        """The number of rows with one of these marks, of which no row has two."""
        count = 0
        for mark in marks:
            if (names := self._marked.get(mark)) is not None:
                count += len(names)
            if self._more:
                count += self._more.get(mark, 0)
        return count

    def marked(self, *marks: Hashable) -> list[Row]:
        """The rows with one of these marks, of which no row has two, in order."""
        self._settle()
        rows = self.of_ids([name for mark in marks if mark in self._marked for name in self._marked[mark]])
        return sorted(rows, key=self.place)

    # -- the rows

    def __getitem__(self, name: str) -> Row:
        if self._taken and (row := self._taken.get(name)) is not None:
            return row
        return self._rows[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The row of this id."""
        if self._taken and (row := self._taken.get(name)) is not None:
            return row
        return self._rows.get(name, default)

    def of_ids(self, names: Collection[str]) -> list[Any]:
        """The row of each of these ids; None where there is none."""
        return [self.get(name) for name in names] if self._taken else self._rows.of(names)

    def __contains__(self, name: object) -> bool:
        return bool(self._taken and name in self._taken) or name in self._rows

    def __len__(self) -> int:
        return len(self._settled())

    def __iter__(self) -> Iterator[str]:
        return iter([row.id for row in sorted(self._settled().values(), key=self.place)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._settled() == other._settled()

    def __hash__(self) -> int:
        return hash(self._settled())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.values())})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """As plain values it is an object: of each id, the row."""
        rows = handler.generate_schema(dict[str, cls.ROW])  # type: ignore[name-defined]
        return core_schema.no_info_after_validator_function(
            lambda by_id: cls(by_id.values()),
            rows,
            serialization=core_schema.plain_serializer_function_ser_schema(dict, return_schema=rows),
        )

    # -- both together

    def _changed(self, before: Row | None, after: Row | None) -> Self:
        table = self._copy()
        table._change(before, after)
        return table

    def _copy(self) -> Self:
        """A table of its own that is not open."""
        table = type(self).__new__(type(self))
        table._rows, table._marked, table.weight = self._rows, self._marked, self.weight
        table._taken, table._came, table._more = None, {}, {}
        return table

    def _change(self, before: Row | None, after: Row | None) -> None:
        left = () if before is None else self.marks(before)
        now = () if after is None else self.marks(after)
        if before is not None:
            self.weight -= self.weigh(before)
        if after is not None:
            self.weight += self.weigh(after)
            self._rows = self._rows.put(after.id, after)
            for mark in now:
                if mark not in left:
                    self._marked = self._marked.insert(mark, self._marked.get(mark, _NOBODY).insert(after.id))
        elif before is not None:
            self._rows = self._rows.drop(before.id)
        if before is not None:
            for mark in left:
                if mark not in now:
                    rest = self._marked[mark].remove(before.id)
                    self._marked = self._marked.insert(mark, rest) if rest else self._marked.remove(mark)

    # -- an open table

    def _open(self) -> None:
        """From now on it notes the rows that have come, by mark whose rows have come or gone, and how many more."""
        self._taken, self._came, self._more = {}, {}, {}

    def _take(self, before: Row | None, after: Row) -> None:
        """Note a row, and for each of its marks whether it has come or gone since the index was last made."""
        assert self._taken is not None
        left, now = () if before is None else self.marks(before), self.marks(after)
        self.weight += self.weigh(after) - (0 if before is None else self.weigh(before))
        name = after.id
        self._taken[name] = after
        if left is now:
            return
        for mark, comes in _differences(left, now):
            moved = self._came.get(mark)
            if moved is None:
                moved = self._came[mark] = {}
            if moved.pop(name, comes) == comes:  # else it is where it was
                moved[name] = comes
            self._more[mark] = self._more.get(mark, 0) + (1 if comes else -1)

    def _settled(self) -> LayeredMap[Row]:
        self._settle()
        return self._rows

    def _settle(self) -> None:
        """Take all that was noted into rows and index."""
        if not self._taken:
            return
        self._rows = self._rows.update(self._taken)
        for mark, moved in self._came.items():
            names = self._marked.get(mark, _NOBODY).update([name for name, comes in moved.items() if comes])
            gone = [name for name, comes in moved.items() if not comes]
            names = _NOBODY if len(gone) == len(names) else reduce(HashTrieSet.remove, gone, names)
            self._marked = self._marked.insert(mark, names) if names else self._marked.discard(mark)
        self._open()


@lru_cache(2**16)
def _differences(left: tuple[Hashable, ...], now: tuple[Hashable, ...]) -> tuple[tuple[Hashable, bool], ...]:
    """The marks that a row has lost, and those that it has got: each with whether it comes."""
    lost, got = [mark for mark in left if mark not in now], [mark for mark in now if mark not in left]
    return (*((mark, False) for mark in lost), *((mark, True) for mark in got))


_NOBODY: "HashTrieSet[str]" = HashTrieSet()
