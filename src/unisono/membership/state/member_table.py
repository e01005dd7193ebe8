"""Immutable tables of rows by id, each with an index, and the immutable mapping that holds the rows."""

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
"""The most entries of the small upper dict."""


class LayeredMap(Mapping[str, V]):
    """An immutable mapping. A map that is made of another one shares most of its memory.

    It has two plain dicts, which are never changed: a large lower one that many maps share, and a small upper one with
    what has changed since. To put one entry costs a copy of the small dict, and now and then of the large one: less
    than in a persistent map, up to some 10^5 entries. To put many, or to look one up, costs a tenth. None is no value.
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
        """The map without an entry; the same map if the entry is not there."""
        return self._with({**self._above, name: _GONE}, self._count - 1) if name in self else self

    def get_many(self, names: Collection[str]) -> list[V | None]:
        """The value of each name; None where there is none."""
        are_few = self._plain is None and len(names) < FEW
        return [*map(self.get if are_few else self.plain().get, names)]

    def plain(self) -> Mapping[str, V]:
        """All entries, as a plain dict that must not be changed."""
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
        """The value of a name; the default if there is none."""
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
        """The names with their values."""
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
    """Rows by id, as a value. A table with another row shares most of its memory with the old one: see ``LayeredMap``.

    Its index has the ids of the rows with each mark, and the sum of the rows' weights. A subclass defines marks and
    weights. Rows and index change together, so a question to the index reads no row.

    An open table is the one exception: it takes rows in place. They are pending until the table is closed, or more than
    a row or a count is asked for: then they are written into rows and index together.
    """

    __slots__ = ("_count_changes", "_marked", "_pending_marks", "_pending_rows", "_rows", "weight")

    ROW: ClassVar[type]
    """The type of the rows."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: LayeredMap[Row] = LayeredMap()
        self._marked: HashTrieMap[Hashable, HashTrieSet[str]] = HashTrieMap()
        self.weight = 0
        self._pending_rows: dict[str, Row] | None = None
        self._pending_marks: dict[Hashable, dict[str, bool]] = {}
        self._count_changes: dict[Hashable, int] = {}
        self._open()
        for row in rows:
            self._add_pending(self.get(row.id), row)
        self._apply_pending()
        self._pending_rows = None

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
        """The table with this row, in place of one with the same id. An open table takes the row and returns itself."""
        if self._pending_rows is not None:
            self._add_pending(self.get(row.id), row)
            return self
        return self._changed(self._rows.get(row.id), row)

    def drop(self, row: Row) -> Self:
        """The table without the row of this one's id. An open table drops the row and returns itself."""
        if self._pending_rows is not None:
            self._apply_pending()
            self._change(self._rows.get(row.id), None)
            return self
        return self._changed(self._rows.get(row.id), None)

    def opened(self) -> Self:
        """An open table with the same rows, for many changes at once."""
        table = self.closed()
        table._open()
        return table

    def closed(self) -> Self:
        """An immutable table with the same rows."""
        self._apply_pending()
        return self._copy()

    def with_rows(self, rows: Iterable[Row]) -> Self:
        """The table with these rows, each in place of one with the same id."""
        table = self.opened()
        for row in rows:
            table.put(row)
        return table.closed()

    # -- the index

    def count(self, *marks: Hashable) -> int:
        """The number of rows with one of these marks; no row may have two of them."""
        count = 0
        for mark in marks:
            if (names := self._marked.get(mark)) is not None:
                count += len(names)
            if self._count_changes:
                count += self._count_changes.get(mark, 0)
        return count

    def marked(self, *marks: Hashable) -> list[Row]:
        """The rows with one of these marks, in order; no row may have two of them."""
        self._apply_pending()
        rows = self.get_many([name for mark in marks if mark in self._marked for name in self._marked[mark]])
        return sorted(rows, key=self.place)

    # -- the rows

    def __getitem__(self, name: str) -> Row:
        if self._pending_rows and (row := self._pending_rows.get(name)) is not None:
            return row
        return self._rows[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The row of an id; the default if there is none."""
        if self._pending_rows and (row := self._pending_rows.get(name)) is not None:
            return row
        return self._rows.get(name, default)

    def get_many(self, names: Collection[str]) -> list[Any]:
        """The row of each of these ids; None where there is none."""
        return [self.get(name) for name in names] if self._pending_rows else self._rows.get_many(names)

    def __contains__(self, name: object) -> bool:
        return bool(self._pending_rows and name in self._pending_rows) or name in self._rows

    def __len__(self) -> int:
        return len(self._current_rows())

    def __iter__(self) -> Iterator[str]:
        return iter([row.id for row in sorted(self._current_rows().values(), key=self.place)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._current_rows() == other._current_rows()

    def __hash__(self) -> int:
        return hash(self._current_rows())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.values())})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Convert a table to plain values as an object with a row for each id, and back."""
        rows = handler.generate_schema(dict[str, cls.ROW])  # type: ignore[name-defined]
        return core_schema.no_info_after_validator_function(
            lambda by_id: cls(by_id.values()),
            rows,
            serialization=core_schema.plain_serializer_function_ser_schema(dict, return_schema=rows),
        )

    # -- rows and index together

    def _changed(self, before: Row | None, after: Row | None) -> Self:
        table = self._copy()
        table._change(before, after)
        return table

    def _copy(self) -> Self:
        table = type(self).__new__(type(self))
        table._rows, table._marked, table.weight = self._rows, self._marked, self.weight
        table._pending_rows, table._pending_marks, table._count_changes = None, {}, {}
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
                    self._marked = self._marked.insert(mark, self._marked.get(mark, _NO_IDS).insert(after.id))
        elif before is not None:
            self._rows = self._rows.drop(before.id)
        if before is not None:
            for mark in left:
                if mark not in now:
                    rest = self._marked[mark].remove(before.id)
                    self._marked = self._marked.insert(mark, rest) if rest else self._marked.remove(mark)

    # -- an open table

    def _open(self) -> None:
        """Start to collect rows, the ids that each mark has got or lost, and how the count of each mark changes."""
        self._pending_rows, self._pending_marks, self._count_changes = {}, {}, {}

    def _add_pending(self, before: Row | None, after: Row) -> None:
        """Collect a row, and the marks that it has got or lost since the index was last made."""
        assert self._pending_rows is not None
        left, now = () if before is None else self.marks(before), self.marks(after)
        self.weight += self.weigh(after) - (0 if before is None else self.weigh(before))
        name = after.id
        self._pending_rows[name] = after
        if left is now:
            return
        for mark, comes in _mark_changes(left, now):
            moved = self._pending_marks.get(mark)
            if moved is None:
                moved = self._pending_marks[mark] = {}
            if moved.pop(name, comes) == comes:  # else the two changes cancel each other
                moved[name] = comes
            self._count_changes[mark] = self._count_changes.get(mark, 0) + (1 if comes else -1)

    def _current_rows(self) -> LayeredMap[Row]:
        self._apply_pending()
        return self._rows

    def _apply_pending(self) -> None:
        if not self._pending_rows:
            return
        self._rows = self._rows.update(self._pending_rows)
        for mark, moved in self._pending_marks.items():
            names = self._marked.get(mark, _NO_IDS).update([name for name, comes in moved.items() if comes])
            gone = [name for name, comes in moved.items() if not comes]
            names = _NO_IDS if len(gone) == len(names) else reduce(HashTrieSet.remove, gone, names)
            self._marked = self._marked.insert(mark, names) if names else self._marked.discard(mark)
        self._open()


@lru_cache(2**16)
def _mark_changes(left: tuple[Hashable, ...], now: tuple[Hashable, ...]) -> tuple[tuple[Hashable, bool], ...]:
    """The marks that a row has lost (False), and those that it has got (True)."""
    lost, got = [mark for mark in left if mark not in now], [mark for mark in now if mark not in left]
    return (*((mark, False) for mark in lost), *((mark, True) for mark in got))


_NO_IDS: "HashTrieSet[str]" = HashTrieSet()
