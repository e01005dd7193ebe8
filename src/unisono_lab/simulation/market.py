"""When hosts are there, and what they cost: from traces, or drawn."""

from __future__ import annotations

import csv
import math
import random
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from heapq import heappop, heappush
from io import TextIOBase, TextIOWrapper
from itertools import count, groupby, pairwise
from pathlib import Path
from typing import Any

from unisono.errors import JobError, Unreadable
from unisono.received import decimal_number, open_file, short, whole_number
from unisono_lab.simulation.scenario import HostKind

# The file of a trace: a CSV file of which each value is checked by itself, and each row beside the others.


MOST_LINES = 10**6
"""A year in steps of five minutes, of nine zones. They take some hundreds of MB."""

LONGEST_LINE = 2000
"""Characters."""

MOST_ZONES = 1000
"""As many as a kind of hosts may have."""

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
        raise _wrong(path, without, "price_per_hour: it is no price, and others have one")
    zones = [[*found] for _, found in groupby(rows, key=lambda row: row.zone)]
    if len(zones) > MOST_ZONES:
        raise JobError(f"the trace {path} has {len(zones)} zones: {MOST_ZONES} are the most")
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
            lines = csv.DictReader(_some_lines(path, text), strict=True, skipinitialspace=True)
            _require_columns(path, lines.fieldnames or ())
            for fields in lines:
                number = lines.line_num
                if None in fields or None in fields.values():
                    raise JobError(f"{path}, line {number}: it has not as many fields as the first line")
                yield number, fields
    except (OSError, Unreadable, UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"the trace {path} cannot be read behind line {number}: {error}") from error


def _some_lines(path: Path, text: TextIOBase) -> Iterator[str]:
    """As many as a trace may have. What is longer than a line may be comes as two, neither of which has all fields."""
    for number in count(1):
        if number > MOST_LINES:
            raise JobError(f"{path}, line {number}: a trace has {MOST_LINES} lines at most")
        if not (line := text.readline(LONGEST_LINE)):
            return
        yield line


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


# When hosts are there, and what they cost: from traces, or drawn.


SHORTEST_S = 1.0
"""No trace is shorter."""

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class HostPrices:
    """The price of an hour of one host, as it changes.

    Attributes:
        times: the moments at which it changes, ascending, the first of them 0.
        values: the price from each of them on.
    """

    times: Sequence[float]
    values: Sequence[float]

    def at(self, moment: float) -> float:
        """The price at a moment, in seconds."""
        return self.values[max(0, bisect_right(self.times, moment) - 1)]

    def cost(self, start: float, end: float) -> float:
        """What one host costs between two moments."""
        total, place = 0.0, max(0, bisect_right(self.times, start) - 1)
        while start < end:
            until = min(end, self.times[place + 1] if place + 1 < len(self.times) else math.inf)
            total += self.values[place] * (until - start) / HOUR_S
            start, place = until, place + 1
        return total


@dataclass(frozen=True, slots=True)
class Stay:
    """The time for which a host is there.

    Attributes:
        start: its first moment, in seconds.
        end: the moment at which it is taken away; infinite if it is not.
        zone: the zone that it is in, whose price it costs.
    """

    start: float
    end: float = math.inf
    zone: str = ""


@dataclass(frozen=True, slots=True)
class Supply:
    """What the market gives of one kind of hosts.

    Attributes:
        kind: the kind.
        stays: the times for which each host is there, in their order.
        prices: the price of an hour, by zone.
    """

    kind: HostKind
    stays: Sequence[Sequence[Stay]]
    prices: Mapping[str, HostPrices]

    def lowest(self, moment: float) -> float:
        """The lowest price of all zones at a moment."""
        return min(prices.at(moment) for prices in self.prices.values())


def supply(kind: HostKind, seed: str, until_s: float, trace: MarketTrace | None = None) -> Supply:
    """What there is of a kind of hosts, drawn by a seed.

    A trace is read from a drawn place on, or from that of the kind; where it ends, from its beginning. What comes
    before a moment does not depend on how much longer it is drawn.

    Args:
        kind: the kind.
        seed: the seed.
        until_s: seconds for which it is drawn.
        trace: the trace of the kind, if it has one.
    """
    chance = random.Random(f"{seed}/{kind.name}")  # noqa: S311 (no secret)
    constant = {"": HostPrices((0.0,), (kind.price,))}
    if trace is not None:
        drawn = chance.uniform(0.0, trace.length_s) if kind.trace_from_s is None else kind.trace_from_s
        return trace.supply(kind, drawn % trace.length_s, until_s)
    if kind.between_losses_s is None:
        return Supply(kind, [[Stay(0.0)] for _ in range(kind.count)], constant)
    stays: list[list[Stay]] = [[] for _ in range(kind.count)]
    for zone in range(min(kind.zones, kind.count)):
        chance = random.Random(f"{seed}/{kind.name}/{zone}") if zone else chance  # noqa: S311 (no secret)
        _draw_zone(kind, chance, range(zone, kind.count, kind.zones), stays, until_s)
    return Supply(kind, stays, constant)


def changes_per_s(kind: HostKind, trace: MarketTrace | None = None) -> float:
    """How often something of a kind of hosts changes in the market, on average: as many values a second are drawn."""
    if trace is not None:
        return len(trace.rows) / trace.length_s
    if kind.between_losses_s is None:
        return 0.0
    return (kind.whole_zone * kind.count + (1 - kind.whole_zone) * kind.zones) / kind.between_losses_s


def _draw_zone(
    kind: HostKind, chance: random.Random, hosts: Sequence[int], stays: Sequence[list[Stay]], until_s: float
) -> None:
    """Moments at which the market takes hosts away come as a Poisson process; hosts are away for exponential times."""
    there = dict.fromkeys(hosts, 0.0)  # since when
    assert kind.between_losses_s is not None
    now = 0.0
    while hosts and (now := now + chance.expovariate(1 / kind.between_losses_s)) < until_s:
        taken = list(hosts) if chance.random() < kind.whole_zone else [chance.choice(hosts)]
        back = now + (chance.expovariate(1 / kind.away_s) if kind.away_s else 0.0)
        for host in taken:
            if there[host] < now:
                stays[host].append(Stay(there[host], now))
            there[host] = max(there[host], back)
    for host in hosts:
        stays[host].append(Stay(there[host]))


@dataclass(frozen=True, slots=True)
class MarketTrace:
    """What a market gave: rows without gaps and without overlaps in each zone.

    Attributes:
        rows: the rows, in order of zones and times; the first one of all begins at 0.
        length_s: the seconds that it covers.
    """

    rows: Sequence[TraceRow]
    length_s: float

    @classmethod
    def read(cls, path: Path) -> MarketTrace:
        """Read a CSV file with the columns start, end and available, and perhaps price_per_hour and zone.

        Times are seconds, or ISO 8601 with an offset from UTC.

        Raises:
            JobError: it cannot be read, or a value is wrong; names line and column.
        """
        rows = read_rows(path)
        first, last = min(row.start for row in rows), max(row.end for row in rows)
        if last - first < SHORTEST_S:
            raise JobError(
                f"the trace {path} covers {last - first:g} s: it is read again and again, and has to be longer"
            )
        moved = [replace(row, start=row.start - first, end=row.end - first) for row in rows]
        return cls(moved, last - first)

    def supply(self, kind: HostKind, offset_s: float, until_s: float) -> Supply:
        """The hosts that there are, from a place of the trace on.

        A host comes in the cheapest zone that has room, and stays there until the zone has less: the last one goes.
        """
        stays: list[list[Stay]] = [[] for _ in range(kind.count)]
        prices: dict[str, list[tuple[float, float]]] = defaultdict(list)
        free = list(range(kind.count))  # a heap
        there: dict[str, list[tuple[int, float]]] = defaultdict(list)  # by zone, hosts and since when, as they came
        now: dict[str, TraceRow] = {}
        for moment, rows in self._changes(offset_s, until_s):
            is_full = bool(free)  # no zone had room, or hosts would be there
            for row in rows:
                now[row.zone] = row
                prices[row.zone].append((moment, kind.price if row.price is None else row.price))
                while len(there[row.zone]) > row.available:
                    host, since = there[row.zone].pop()
                    stays[host].append(Stay(since, moment, row.zone))
                    heappush(free, host)
            roomy = (rows if is_full else now.values()) if free else ()
            for row in sorted(roomy, key=lambda row: (prices[row.zone][-1][1], row.zone)):
                while free and len(there[row.zone]) < row.available:
                    there[row.zone].append((heappop(free), moment))
        for zone, hosts in there.items():
            for host, since in hosts:
                stays[host].append(Stay(since, zone=zone))
        return Supply(kind, stays, {zone: _prices(changes) for zone, changes in prices.items()})

    def _changes(self, offset_s: float, until_s: float) -> Iterator[tuple[float, Sequence[TraceRow]]]:
        """The rows that begin at each moment, from a place of the trace on; at first those of all zones."""
        begin = {start: [*rows] for start, rows in groupby(sorted(self.rows, key=_start), key=_start)}
        starts = [*begin]
        place = max(0, bisect_right(starts, offset_s) - 1)
        moment, turn = 0.0, 0
        now = {row.zone: row for start in starts[: place + 1] for row in begin[start]}
        rows: Sequence[TraceRow] = [*now.values()]
        while moment < until_s:
            yield moment, rows
            place += 1
            if place == len(starts):
                place, turn = 0, turn + 1
            moment, rows = turn * self.length_s + starts[place] - offset_s, begin[starts[place]]


def _start(row: TraceRow) -> float:
    return row.start


def _prices(changes: Iterable[tuple[float, float]]) -> HostPrices:
    """Of one zone, without moments at which its price stays what it is."""
    firsts = [next(alike) for _, alike in groupby(changes, key=lambda change: change[1])]
    times, values = zip(*firsts, strict=True)
    return HostPrices(times, values)
