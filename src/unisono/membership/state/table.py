"""Rows by id, as a value that never changes, and the index beside them."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from rpds import HashTrieMap, HashTrieSet


class HasId(Protocol):
    """A row."""

    @property
    def id(self) -> str:
        """Its id, which no other row of its table has."""


Row = TypeVar("Row", bound=HasId)


class Table(Mapping[str, Row], Generic[Row]):
    """Rows by id, as a value. A table with another row shares all but O(log n) with the one before.

    Beside the rows stand the ids of the rows with each mark, and the sum of the rows' weights. A subclass says what
    marks and weights are. Rows and index change together, so whoever asks the index looks at no row.

    Args:
        rows: the rows, in any order.
    """

    __slots__ = ("_marked", "_rows", "weight")

    ROW: ClassVar[type]
    """The type of the rows."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: HashTrieMap[str, Row] = HashTrieMap()
        self._marked: HashTrieMap[Hashable, HashTrieSet[str]] = HashTrieMap()
        self.weight = 0
        for row in rows:
            self._change(self._rows.get(row.id), row)

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
        """The table with this row, in place of one with the same id."""
        return self._changed(self._rows.get(row.id), row)

    def drop(self, row: Row) -> Self:
        """The table without a row of this one's id."""
        return self._changed(self._rows.get(row.id), None)

    def mapped(self, function: Callable[[Row], Row]) -> Self:
        """The table of what a function makes of each row."""
        return type(self)(map(function, self._rows.values()))

    # -- the index

    def count(self, *marks: Hashable) -> int:
        """The number of rows with one of these marks, of which no row has two."""
        found = 0
        for mark in marks:
            if (names := self._marked.get(mark)) is not None:
                found += len(names)
        return found

    def marked(self, *marks: Hashable) -> list[Row]:
        """The rows with one of these marks, of which no row has two, in order."""
        found = [self._rows[name] for mark in marks if mark in self._marked for name in self._marked[mark]]
        return sorted(found, key=self.place)

    # -- the rows

    def __getitem__(self, name: str) -> Row:
        return self._rows[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The row of this id."""
        return self._rows.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter([row.id for row in sorted(self._rows.values(), key=self.place)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash(self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.values())})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """As plain values it is an object: of each id, the row."""
        rows = handler.generate_schema(dict[str, cls.ROW])  # type: ignore[name-defined]
        return core_schema.no_info_after_validator_function(
            lambda found: cls(found.values()),
            rows,
            serialization=core_schema.plain_serializer_function_ser_schema(dict, return_schema=rows),
        )

    # -- both together

    def _changed(self, before: Row | None, after: Row | None) -> Self:
        table = type(self).__new__(type(self))
        table._rows, table._marked, table.weight = self._rows, self._marked, self.weight
        table._change(before, after)
        return table

    def _change(self, before: Row | None, after: Row | None) -> None:
        left = () if before is None else self.marks(before)
        now = () if after is None else self.marks(after)
        if before is not None:
            self.weight -= self.weigh(before)
        if after is not None:
            self.weight += self.weigh(after)
            self._rows = self._rows.insert(after.id, after)
            for mark in now:
                if mark not in left:
                    self._marked = self._marked.insert(mark, self._marked.get(mark, _NOBODY).insert(after.id))
        elif before is not None:
            self._rows = self._rows.remove(before.id)
        if before is not None:
            for mark in left:
                if mark not in now:
                    rest = self._marked[mark].remove(before.id)
                    self._marked = self._marked.insert(mark, rest) if rest else self._marked.remove(mark)


_NOBODY: "HashTrieSet[str]" = HashTrieSet()
