"""A table of words and figures, as a reader sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Field(NamedTuple):
    """The text of one cell of a table.

    Attributes:
        text: the figure.
        below: its interval, in smaller letters.
    """

    text: str
    below: str = ""


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """Rows of fields.

    Attributes:
        head: the head of each column.
        rows: the rows, with one field for each column.
        text_columns: the number of columns of words, from the left; the others are figures.
        note: the text below the table.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Field]]
    text_columns: int = 0
    note: str = ""

    @classmethod
    def of(
        cls, head: Sequence[str], rows: Sequence[Sequence[Field | str]], text_columns: int = 0, note: str = ""
    ) -> WrittenTable:
        """A table in which a field without an interval is its text alone."""
        whole = [[field if isinstance(field, Field) else Field(field) for field in row] for row in rows]
        return cls(head, whole, text_columns, note)

    def with_columns(self, places: Sequence[int]) -> WrittenTable:
        """Some of its columns."""
        rows = [[row[place] for place in places] for row in self.rows]
        words = sum(place < self.text_columns for place in places)
        return WrittenTable([self.head[place] for place in places], rows, words, self.note)

    def without_empty_columns(self, nothing: str) -> WrittenTable:
        """The same without columns in which nothing stands."""
        kept = [
            place for place in range(len(self.head)) if any(row[place].text not in ("", nothing) for row in self.rows)
        ]
        return self.with_columns(kept)
