"""When hosts are available, and their prices: from traces, or drawn."""

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

# The CSV file of a trace: each value is checked by itself, and each row against the others.


MOST_LINES = 10**6
"""The most lines of a trace: a year in steps of five minutes, of nine zones. They take some hundreds of MB."""

LONGEST_LINE = 2000
"""The most characters of a line."""

MOST_ZONES = 1000
"""The most zones of a trace, as many as a kind of hosts may have."""

LATEST_S = 1e12
"""The largest distance of a moment from 1970."""

MOST_AVAILABLE, DEAREST = 10**6, 1e12

HEAD = (
    "a trace has start, end (seconds, or ISO 8601 with an offset from UTC) and available (hosts), and may have "
    "price_per_hour (of one host) and zone, with commas between them"
)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """The number of hosts and their price in a time span, in seconds, with the number of the line."""

    start: float
    end: float
    available: int
    price: float | None
    zone: str
    line: int


def read_rows(path: Path) -> list[TraceRow]:
    """Read all rows, ordered by zone and time; there are no gaps or overlaps, and all zones cover the same time.

    Raises:
        JobError: the file cannot be read, or a value is wrong; the message names line and column.
    """
    rows = sorted(_rows(path), key=lambda row: (row.zone, row.start))
    if not rows:
        raise JobError(f"the trace {path} has no rows")
    line_without_price = min((row.line for row in rows if row.price is None), default=None)
    if line_without_price is not None and any(row.price is not None for row in rows):
        raise _error_at(path, line_without_price, "price_per_hour: it is empty, but others have a price")
    zones = [[*zone] for _, zone in groupby(rows, key=lambda row: row.zone)]
    if len(zones) > MOST_ZONES:
        raise JobError(f"the trace {path} has {len(zones)} zones: {MOST_ZONES} are the most")
    for zone in zones:
        _require_whole(path, zone, zones[0])
    return rows


def _error_at(path: Path, line: int, why: str) -> JobError:
    return JobError(f"{path}, line {line}, column {why}")


def _require_whole(path: Path, rows: Sequence[TraceRow], others: Sequence[TraceRow]) -> None:
    """Require that rows of a zone have no gaps or overlaps, and cover the same time as those of another zone."""
    for before, row in pairwise(rows):
        if row.start != before.end:
            problem = "overlaps" if row.start < before.end else "leaves a gap behind"
            by = f"by {abs(row.start - before.end):g} s: each row begins where the one before it in its zone ends"
            raise _error_at(path, row.line, f"start: it {problem} line {before.line}, {by}")
    if rows[0].start != others[0].start:
        raise _error_at(path, rows[0].line, f"start: another zone begins at another time, in line {others[0].line}")
    if rows[-1].end != others[-1].end:
        raise _error_at(path, rows[-1].line, f"end: another zone ends at another time, in line {others[-1].line}")


def _rows(path: Path) -> Iterator[TraceRow]:
    """Read the lines one by one, and keep their values alone, since a file may have many."""
    number = 0
    try:
        with open_file(path) as file, TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            lines = csv.DictReader(_limited_lines(path, text), strict=True, skipinitialspace=True)
            _require_columns(path, lines.fieldnames or ())
            for fields in lines:
                number = lines.line_num
                if None in fields or None in fields.values():
                    raise JobError(f"{path}, line {number}: it has more or fewer fields than the first line")
                yield _row(path, number, fields)
    except (OSError, Unreadable, UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"the trace {path} cannot be read behind line {number}: {error}") from error


def _row(path: Path, line: int, fields: Mapping[str, str]) -> TraceRow:
    values: list[Any] = []
    for column, read in READERS.items():
        text = (fields.get(column) or "").strip()
        try:
            values.append(read(text))
        except (ValueError, OverflowError) as error:
            raise _error_at(path, line, f"{column}: {short(text)}: {error}") from None
    row = TraceRow(*[*values, line])
    if not row.end > row.start:
        raise _error_at(path, line, "end: it is not after the start")
    return row


def _limited_lines(path: Path, text: TextIOBase) -> Iterator[str]:
    """At most as many lines as a trace may have. A line that is too long is cut in two, which lack fields."""
    for number in count(1):
        if number > MOST_LINES:
            raise JobError(f"{path}, line {number}: a trace has {MOST_LINES} lines at most")
        if not (line := text.readline(LONGEST_LINE)):
            return
        yield line


def _require_columns(path: Path, names: Sequence[str]) -> None:
    for place, name in enumerate(names, start=1):
        if name not in READERS or name in names[: place - 1]:
            problem = "occurs twice" if name in READERS else "belongs to no trace"
            raise JobError(f"{path}, line 1, column {place}: {short(name)} {problem}: {HEAD}")
    if missing := [name for name in NEEDED if name not in names]:
        raise JobError(f"{path}, line 1: a column is missing: {', '.join(missing)}: {HEAD}")


def _time(text: str) -> float:
    """The time of a text: seconds, or a moment in ISO 8601, in seconds since 1970."""
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
    hosts = whole_number(text)
    if hosts is None or not 0 <= hosts <= MOST_AVAILABLE:
        raise ValueError(f"it is no whole number of hosts from 0 to {MOST_AVAILABLE}")
    return hosts


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
"""The function that reads a value, for each possible column of a trace."""

NEEDED = ("start", "end", "available")


# When hosts are available, and their prices.


SHORTEST_S = 1.0
"""The shortest time that a trace may cover."""

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class HostPrices:
    """The price of an hour of one host, as it changes.

    Attributes:
        times: the moments at which it changes, ascending, the first of them 0.
        values: the price from each of these moments on.
    """

    times: Sequence[float]
    values: Sequence[float]

    def at(self, moment: float) -> float:
        """The price at a moment, in seconds."""
        return self.values[max(0, bisect_right(self.times, moment) - 1)]

    def cost(self, start: float, end: float) -> float:
        """The cost of one host between two moments."""
        total, place = 0.0, max(0, bisect_right(self.times, start) - 1)
        while start < end:
            until = min(end, self.times[place + 1] if place + 1 < len(self.times) else math.inf)
            total += self.values[place] * (until - start) / HOUR_S
            start, place = until, place + 1
        return total


@dataclass(frozen=True, slots=True)
class Stay:
    """A time span in which a host is available.

    Attributes:
        start: the first moment of the stay, in seconds.
        end: the moment at which it is taken away; infinite if it is not.
        zone: the zone of the host, which decides its price.
    """

    start: float
    end: float = math.inf
    zone: str = ""


@dataclass(frozen=True, slots=True)
class Supply:
    """The hosts of one kind in the market."""

    kind: HostKind
    stays: Sequence[Sequence[Stay]]
    prices: Mapping[str, HostPrices]

    def lowest(self, moment: float) -> float:
        """The lowest price of all zones at a moment."""
        return min(prices.at(moment) for prices in self.prices.values())


def supply(kind: HostKind, seed: str, until_s: float, trace: MarketTrace | None = None) -> Supply:
    """Draw the supply of a kind of hosts.

    A trace begins at a drawn place, or at that of the kind, and is repeated where it ends. A longer ``until_s`` does
    not change what was drawn for earlier moments.
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
    """The mean number of changes per second of a kind of hosts in the market; as many values are drawn."""
    if trace is not None:
        return len(trace.rows) / trace.length_s
    if kind.between_losses_s is None:
        return 0.0
    return (kind.whole_zone * kind.count + (1 - kind.whole_zone) * kind.zones) / kind.between_losses_s


def _draw_zone(
    kind: HostKind, chance: random.Random, hosts: Sequence[int], stays: Sequence[list[Stay]], until_s: float
) -> None:
    """Draw the stays of a zone: losses are a Poisson process, and the times until hosts are back are exponential."""
    since = dict.fromkeys(hosts, 0.0)  # by host, the moment since which it is available
    assert kind.between_losses_s is not None
    now = 0.0
    while hosts and (now := now + chance.expovariate(1 / kind.between_losses_s)) < until_s:
        taken = list(hosts) if chance.random() < kind.whole_zone else [chance.choice(hosts)]
        back_at = now + (chance.expovariate(1 / kind.away_s) if kind.away_s else 0.0)
        for host in taken:
            if since[host] < now:
                stays[host].append(Stay(since[host], now))
            since[host] = max(since[host], back_at)
    for host in hosts:
        stays[host].append(Stay(since[host]))


@dataclass(frozen=True, slots=True)
class MarketTrace:
    """The record of a market: rows without gaps and without overlaps in each zone.

    Attributes:
        rows: the rows, ordered by zone and time; the earliest begins at 0.
    """

    rows: Sequence[TraceRow]
    length_s: float

    @classmethod
    def read(cls, path: Path) -> MarketTrace:
        """Read a CSV file with the columns start, end and available, and perhaps price_per_hour and zone.

        Times are seconds, or ISO 8601 with an offset from UTC.

        Raises:
            JobError: the file cannot be read, or a value is wrong; the message names line and column.
        """
        rows = read_rows(path)
        first, last = min(row.start for row in rows), max(row.end for row in rows)
        if last - first < SHORTEST_S:
            raise JobError(f"the trace {path} covers {last - first:g} s: it is repeated, and has to be longer")
        moved = [replace(row, start=row.start - first, end=row.end - first) for row in rows]
        return cls(moved, last - first)

    def supply(self, kind: HostKind, offset_s: float, until_s: float) -> Supply:
        """The supply from a place of the trace on.

        A host comes in the cheapest zone that has room. When a zone has fewer hosts, those that came last go.
        """
        stays: list[list[Stay]] = [[] for _ in range(kind.count)]
        prices: dict[str, list[tuple[float, float]]] = defaultdict(list)
        free = list(range(kind.count))  # a heap
        rented: dict[str, list[tuple[int, float]]] = defaultdict(list)  # by zone: hosts with the moments of coming
        now: dict[str, TraceRow] = {}
        for moment, rows in self._changes(offset_s, until_s):
            is_full = bool(free)  # all zones are full, since hosts are free and would have come
            for row in rows:
                now[row.zone] = row
                prices[row.zone].append((moment, kind.price if row.price is None else row.price))
                while len(rented[row.zone]) > row.available:
                    host, since = rented[row.zone].pop()
                    stays[host].append(Stay(since, moment, row.zone))
                    heappush(free, host)
            candidates = (rows if is_full else now.values()) if free else ()
            for row in sorted(candidates, key=lambda row: (prices[row.zone][-1][1], row.zone)):
                while free and len(rented[row.zone]) < row.available:
                    rented[row.zone].append((heappop(free), moment))
        for zone, hosts in rented.items():
            for host, since in hosts:
                stays[host].append(Stay(since, zone=zone))
        return Supply(kind, stays, {zone: _prices(changes) for zone, changes in prices.items()})

    def _changes(self, offset_s: float, until_s: float) -> Iterator[tuple[float, Sequence[TraceRow]]]:
        """The rows that begin at each moment, from a place of the trace on; at the first moment those of all zones."""
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
    """The prices of one zone, without moments at which the price does not change."""
    firsts = [next(equal) for _, equal in groupby(changes, key=lambda change: change[1])]
    times, values = zip(*firsts, strict=True)
    return HostPrices(times, values)
