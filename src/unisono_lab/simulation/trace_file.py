"""The file of a trace: lines of fields with commas between them, each of which is checked by itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count, pairwise
from pathlib import Path

from unisono.errors import JobError, Unreadable
from unisono.received import decimal_number, open_file, whole_number

MOST_LINES = 10**6
"""A year in steps of five minutes, of nine zones. They take some hundreds of MB."""

LONGEST_LINE = 2000
"""Bytes."""

LONGEST_FIELD = 60
"""Characters."""

MOST_ZONES = 1000
"""As many as a kind of hosts may have."""

LATEST_S = 1e12
"""No moment is later, or earlier than as long before 1970."""

MOST_AVAILABLE, DEAREST = 10**6, 1e12

COLUMNS = ("start", "end", "available", "price_per_hour", "zone")
"""Of a trace: the first three are needed."""

MOMENT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(?P<offset>Z|[+-][0-9]{2}:?[0-9]{2})?"
)
"""A time of ISO 8601 with all its separators."""

DATE = re.compile(r"(19|20)[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])")
"""What some write for a date, and what would be so many seconds."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """So many hosts, at such a price, from one moment to another, in seconds; and the number of its line."""

    start: float
    end: float
    available: int
    price: float | None
    zone: str
    line: int


@dataclass(frozen=True, slots=True)
class TraceLine:
    """The fields of a line by column, and whom to blame for them."""

    path: Path
    number: int
    fields: Mapping[str, str]

    def wrong(self, column: str, why: str) -> JobError:
        """The error that names the place and the value."""
        return self.wrong_at(column, f"{self.fields.get(column, '')!r} {why}")

    def wrong_at(self, column: str, why: str) -> JobError:
        """The error that names the place."""
        return JobError(f"{self.path}, line {self.number}, column {column}: {why}")


def read_rows(path: Path) -> list[TraceRow]:
    """All rows, in the order of zones and times: without gaps and overlaps, and of all zones for the same time.

    Raises:
        JobError: it cannot be read, or a value is wrong; names line and column.
    """
    rows = sorted(_rows(path), key=lambda row: (row.zone, row.start))
    if not rows:
        raise JobError(f"the trace {path} has no rows")
    _require_prices(path, rows)
    by_zone: dict[str, list[TraceRow]] = defaultdict(list)
    for row in rows:
        by_zone[row.zone].append(row)
    if len(by_zone) > MOST_ZONES:
        first = sorted(min(row.line for row in found) for found in by_zone.values())[MOST_ZONES]
        raise _line_at(path, first).wrong("zone", f"is one zone more than the {MOST_ZONES} that a trace may have")
    for found in by_zone.values():
        _require_whole(path, found)
    _require_one_span(path, [*by_zone.values()])
    return rows


def _rows(path: Path) -> Iterator[TraceRow]:
    """Lines are read one by one, and only their values are kept: a file may have many."""
    kind: bool | None = None
    zones: dict[str, str] = {}
    for line in _lines(path):
        times = []
        for column in ("start", "end"):
            is_moment, seconds = _time(line, column)
            if kind not in (None, is_moment):
                raise line.wrong(column, "is of another kind than the times before it: seconds, or ISO 8601")
            kind = is_moment
            times.append(seconds)
        start, end = times
        if not end > start:
            raise line.wrong("end", "is not after its start")
        zone = line.fields.get("zone", "")
        yield TraceRow(start, end, _available(line), _price(line), zones.setdefault(zone, zone), line.number)


def _lines(path: Path) -> Iterator[TraceLine]:
    """All lines behind the first that are not blank. What is no UTF-8 is found in its field."""
    columns: Sequence[str] = ()
    try:
        with open_file(path) as file:
            for number in count(1):
                data = file.readline(LONGEST_LINE)
                written = data.decode(errors="surrogateescape").removesuffix("\n").removesuffix("\r")
                if number == 1:
                    columns = _columns(path, written.removeprefix("\ufeff"))
                elif not data:
                    return
                elif written.strip():
                    yield _line(path, number, columns, written)
                if number > MOST_LINES:
                    raise JobError(f"{path}, line {number}: a trace has {MOST_LINES} lines at most")
                if len(data) == LONGEST_LINE and not data.endswith(b"\n"):
                    raise JobError(f"{path}, line {number}: it is longer than {LONGEST_LINE} bytes")
    except (OSError, Unreadable) as error:
        raise JobError(f"the trace {path} cannot be read: {error}") from error


def _line_at(path: Path, number: int) -> TraceLine:
    """A line that was read before."""
    return next(line for line in _lines(path) if line.number == number)


def _columns(path: Path, written: str) -> list[str]:
    names = [_unquoted(name) for name in written.split(",")]
    for place, name in enumerate(names, start=1):
        if name not in COLUMNS or name in names[: place - 1]:
            what = "is there twice" if name in COLUMNS else "is none of a trace"
            raise JobError(f"{path}, line 1, column {place}: {name[:LONGEST_FIELD]!r} {what}: {_HEAD}")
    if missing := [name for name in COLUMNS[:3] if name not in names]:
        raise JobError(f"{path}, line 1: a column is missing: {', '.join(missing)}: {_HEAD}")
    return names


_HEAD = (
    "it has start, end (seconds, or ISO 8601 with an offset from UTC) and available (hosts), and may have "
    "price_per_hour (of one host) and zone, with commas between them"
)


def _line(path: Path, number: int, columns: Sequence[str], written: str) -> TraceLine:
    fields = [_unquoted(field) for field in written.split(",")]
    line = TraceLine(path, number, dict(zip(columns, fields, strict=False)))
    for column, field in line.fields.items():
        if len(field) > LONGEST_FIELD:
            raise line.wrong_at(column, f"{field[:20]!r} … is longer than {LONGEST_FIELD} characters")
    if len(fields) != len(columns):
        where = columns[len(fields)] if len(fields) < len(columns) else str(len(columns) + 1)
        raise line.wrong_at(where, f"the line has {len(fields)} fields, and the first has {len(columns)}")
    for column, field in line.fields.items():
        if not field.isprintable():
            raise line.wrong_at(column, f"{field!a} has characters that are no text, or no UTF-8")
        if '"' in field:
            raise line.wrong(column, "has a quote that begins or ends nothing")
    return line


def _unquoted(field: str) -> str:
    """A field without the blanks around it, and the quotes."""
    field = field.strip(" \t")
    return field[1:-1].strip(" \t") if len(field) > 1 and field[0] == field[-1] == '"' else field


def _time(line: TraceLine, column: str) -> tuple[bool, float]:
    """Whether it is a moment of ISO 8601, and its seconds."""
    text = line.fields[column]
    seconds, moment = decimal_number(text), MOMENT.fullmatch(text)
    if seconds is not None and DATE.fullmatch(text):
        raise line.wrong(column, "may be a date or seconds: write 2026-01-31T12:00:00+00:00, or seconds with a .0")
    if seconds is None:
        if moment is None:
            raise line.wrong(column, "is neither seconds nor a time of ISO 8601, such as 2026-01-31T12:00:00+00:00")
        if moment["offset"] is None:
            raise line.wrong(column, "has no offset from UTC: write 2026-01-31T12:00:00+00:00")
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError) as error:
            raise line.wrong(column, f"is no time that there is: {error}") from None
    if not abs(seconds) < LATEST_S:
        raise line.wrong(column, f"is beyond {LATEST_S:g} s: seconds are meant, not milliseconds")
    return moment is not None, seconds


def _available(line: TraceLine) -> int:
    found = whole_number(line.fields["available"])
    if found is None or not 0 <= found <= MOST_AVAILABLE:
        raise line.wrong("available", f"is no whole number of hosts from 0 to {MOST_AVAILABLE}")
    return found


def _price(line: TraceLine) -> float | None:
    if not (text := line.fields.get("price_per_hour", "")):
        return None
    price = decimal_number(text)
    if price is None:
        raise line.wrong("price_per_hour", "is no number with a decimal point, and without a currency or a unit")
    if not 0 <= price < DEAREST:
        raise line.wrong("price_per_hour", "is no price from 0 on")
    return price


def _require_prices(path: Path, rows: Sequence[TraceRow]) -> None:
    """All rows have a price, or none has."""
    with_price = next((row for row in rows if row.price is not None), None)
    without = min((row.line for row in rows if row.price is None), default=None)
    if with_price is not None and without is not None:
        raise _line_at(path, without).wrong("price_per_hour", f"is no price, and line {with_price.line} has one")


def _require_whole(path: Path, rows: Sequence[TraceRow]) -> None:
    """Rows of a zone follow each other without gaps and overlaps."""
    for before, row in pairwise(rows):
        if row.start != before.end:
            what = "overlaps" if row.start < before.end else "leaves a gap behind"
            place = f" in zone {row.zone}" if row.zone else ""
            by = f"by {abs(row.start - before.end):g} s: each row begins where the one before it ends"
            raise _line_at(path, row.line).wrong("start", f"{what} line {before.line}{place}, {by}")


def _require_one_span(path: Path, zones: Sequence[Sequence[TraceRow]]) -> None:
    """All zones begin and end at the same moments: nobody knows what was between."""
    first, last = zones[0][0], zones[0][-1]
    for rows in zones[1:]:
        if rows[0].start != first.start:
            why = f"is the beginning of zone {rows[0].zone!r}, and line {first.line} has another one"
            raise _line_at(path, rows[0].line).wrong("start", why)
        if rows[-1].end != last.end:
            why = f"is the end of zone {rows[-1].zone!r}, and line {last.line} has another one"
            raise _line_at(path, rows[-1].line).wrong("end", why)
