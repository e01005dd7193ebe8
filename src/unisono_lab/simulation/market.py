"""When hosts are there, and what they cost: from traces, or drawn."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import groupby
from pathlib import Path

from unisono.errors import JobError
from unisono_lab.simulation.scenario import HostKind
from unisono_lab.simulation.trace_file import TraceRow, read_rows

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
