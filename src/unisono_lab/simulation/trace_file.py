"""The file of a trace: a CSV file of which each value is checked by itself, and each row beside the others."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import TextIOWrapper
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from unisono.errors import JobError, Unreadable
from unisono.received import decimal_number, open_file, short, whole_number

MOST_LINES = 10**6
"""A year in steps of five minutes, of nine zones. They take some hundreds of MB."""

LATEST_S = 1e12
"""No moment is later, or earlier than as long before 1970."""

MOST_AVAILABLE, DEAREST = 10**6, 1e12

HEAD = (
    "a trace has start, end (seconds, or ISO 8601 with an offset from UTC) and available (hosts), and may have "
    "price_per_hour (of one host) and zone, with commas between them"
)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """So many hosts, at such a price, from one moment to another, in seconds; and the number of its line."""

    start: float
    end: float
    available: int
    price: float | None
    zone: str
    line: int


def read_rows(path: Path) -> list[TraceRow]:
    """All rows, in the order of zones and times: without gaps and overlaps, and of all zones for the same time.

    Raises:
        JobError: it cannot be read, or a value is wrong; names line and column.
    """
    rows = sorted(_rows(path), key=lambda row: (row.zone, row.start))
    if not rows:
        raise JobError(f"the trace {path} has no rows")
    without = min((row.line for row in rows if row.price is None), default=None)
    if without is not None and any(row.price is not None for row in rows):
        raise _wrong(path, without, "price_per_hour: it is no price, and other lines have one")
    zones = [[*found] for _, found in groupby(rows, key=lambda row: row.zone)]
    for found in zones:
        _require_whole(path, found, zones[0])
    return rows


def _wrong(path: Path, line: int, why: str) -> JobError:
    return JobError(f"{path}, line {line}, column {why}")


def _require_whole(path: Path, rows: Sequence[TraceRow], others: Sequence[TraceRow]) -> None:
    """Rows of a zone follow each other, and begin and end with those of another one: nobody knows what was between."""
    for before, row in pairwise(rows):
        if row.start != before.end:
            what = "overlaps" if row.start < before.end else "leaves a gap behind"
            by = f"by {abs(row.start - before.end):g} s: each row begins where the one before it in its zone ends"
            raise _wrong(path, row.line, f"start: it {what} line {before.line}, {by}")
    if rows[0].start != others[0].start:
        raise _wrong(path, rows[0].line, f"start: another zone begins at another time, in line {others[0].line}")
    if rows[-1].end != others[-1].end:
        raise _wrong(path, rows[-1].line, f"end: another zone ends at another time, in line {others[-1].line}")


def _rows(path: Path) -> Iterator[TraceRow]:
    """Lines are read one by one, and only their values are kept: a file may have many."""
    for line, fields in _lines(path):
        values: list[Any] = []
        for column, read in READERS.items():
            text = (fields.get(column) or "").strip()
            try:
                values.append(read(text))
            except (ValueError, OverflowError) as error:
                raise _wrong(path, line, f"{column}: {short(text)}: {error}") from None
        row = TraceRow(*[*values, line])
        if not row.end > row.start:
            raise _wrong(path, line, "end: it is not after the start")
        yield row


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The number of each line behind the first, and its fields by column."""
    number = 0
    try:
        with open_file(path) as file, TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            lines = csv.DictReader(text, strict=True, skipinitialspace=True)
            _require_columns(path, lines.fieldnames or ())
            for fields in lines:
                number = lines.line_num
                if number > MOST_LINES:
                    raise JobError(f"{path}, line {number}: a trace has {MOST_LINES} lines at most")
                if None in fields or None in fields.values():
                    raise JobError(f"{path}, line {number}: it has not as many fields as the first line")
                yield number, fields
    except (OSError, Unreadable, UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"the trace {path} cannot be read behind line {number}: {error}") from error


def _require_columns(path: Path, names: Sequence[str]) -> None:
    for place, name in enumerate(names, start=1):
        if name not in READERS or name in names[: place - 1]:
            what = "is there twice" if name in READERS else "is none of a trace"
            raise JobError(f"{path}, line 1, column {place}: {short(name)} {what}: {HEAD}")
    if missing := [name for name in NEEDED if name not in names]:
        raise JobError(f"{path}, line 1: a column is missing: {', '.join(missing)}: {HEAD}")


def _time(text: str) -> float:
    """Of seconds, or of a moment of ISO 8601."""
    seconds = decimal_number(text)
    if seconds is None:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError("it has no offset from UTC: write 2026-01-31T12:00:00+00:00")
        seconds = moment.timestamp()
    if not abs(seconds) < LATEST_S:
        raise ValueError(f"it is beyond {LATEST_S:g} s: seconds are meant, not milliseconds")
    return seconds


def _available(text: str) -> int:
    found = whole_number(text)
    if found is None or not 0 <= found <= MOST_AVAILABLE:
        raise ValueError(f"it is no whole number of hosts from 0 to {MOST_AVAILABLE}")
    return found


def _price(text: str) -> float | None:
    price = decimal_number(text) if text else None
    if text and (price is None or not 0 <= price < DEAREST):
        raise ValueError("it is no price from 0 on, with a decimal point and without a currency or a unit")
    return price


READERS: Mapping[str, Callable[[str], Any]] = {
    "start": _time,
    "end": _time,
    "available": _available,
    "price_per_hour": _price,
    "zone": sys.intern,
}
"""Of each column that a trace may have."""

NEEDED = ("start", "end", "available")
