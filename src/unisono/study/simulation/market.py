"""When hosts are there, and what they cost: from traces, or drawn."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from unisono.errors import JobError
from unisono.study.simulation.scenario import HostKind
from unisono.study.simulation.trace_file import TraceRow, read_rows

T = TypeVar("T")

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

    times: Sequence[float] = (0.0,)
    values: Sequence[float] = (0.0,)

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
    """

    start: float
    end: float = math.inf


@dataclass(frozen=True, slots=True)
class Supply:
    """What the market gives of one kind of hosts.

    Attributes:
        kind: the kind.
        stays: the times for which each host is there, in their order.
        prices: the price of an hour.
    """

    kind: HostKind
    stays: Sequence[Sequence[Stay]]
    prices: HostPrices


def supply(kind: HostKind, seed: str, until_s: float, trace: MarketTrace | None = None) -> Supply:
    """What there is of a kind of hosts, drawn by a seed.

    A trace is read from a drawn place on, or from that of the kind; where it ends, from its beginning.

    Args:
        kind: the kind.
        seed: the seed.
        until_s: seconds for which it is drawn.
        trace: the trace of the kind, if it has one.
    """
    chance = random.Random(f"{seed}/{kind.name}")  # noqa: S311 (no secret)
    constant = HostPrices((0.0,), (kind.price,))
    if trace is not None:
        drawn = chance.uniform(0.0, trace.length_s) if kind.trace_from_s is None else kind.trace_from_s
        return trace.supply(kind, drawn % trace.length_s, until_s)
    if kind.between_losses_s is None:
        return Supply(kind, [[Stay(0.0)] for _ in range(kind.count)], constant)
    zones = [list(range(kind.count))[zone :: kind.zones] for zone in range(kind.zones)]
    stays: list[list[Stay]] = [[] for _ in range(kind.count)]
    for hosts in zones:
        _draw_zone(kind, chance, hosts, stays, until_s)
    return Supply(kind, stays, constant)


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
    length_s: float = field(default=0.0)

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
        """The hosts that there are, from a place of the trace on."""
        stays: list[list[Stay]] = [[] for _ in range(kind.count)]
        changes = list(self._levels(offset_s, until_s))
        since: dict[int, float] = {}
        for moment, level in changes:
            for host in range(kind.count):
                if host < level and host not in since:
                    since[host] = moment
                elif host >= level and host in since:
                    stays[host].append(Stay(since.pop(host), moment))
        for host, start in since.items():
            stays[host].append(Stay(start))
        prices = list(self._prices(offset_s, until_s))
        times, values = zip(*prices, strict=True) if prices else ((0.0,), (kind.price,))
        return Supply(kind, stays, HostPrices(times, values))

    def _levels(self, offset_s: float, until_s: float) -> Iterator[tuple[float, int]]:
        """How many hosts there are in all zones, each time that it changes."""
        yield from self._changes(offset_s, until_s, lambda rows: sum(row.available for row in rows))

    def _prices(self, offset_s: float, until_s: float) -> Iterator[tuple[float, float]]:
        """The lowest price of all zones that have hosts, each time that it changes."""
        if self.rows[0].price is None:
            return

        def lowest(rows: Collection[TraceRow]) -> float:
            there = [row for row in rows if row.available] or rows
            return min(row.price for row in there if row.price is not None)

        yield from self._changes(offset_s, until_s, lowest)

    def _changes(
        self, offset_s: float, until_s: float, value: Callable[[Collection[TraceRow]], T]
    ) -> Iterator[tuple[float, T]]:
        """A value of all zones' rows each time that it changes, from a place of the trace on."""
        found: list[tuple[float, T]] = []
        now: dict[str, TraceRow] = {}
        for row in sorted(self.rows, key=lambda row: row.start):
            now[row.zone] = row
            alive = [one for one in now.values() if one.end > row.start]
            if found and found[-1][0] == row.start:
                found.pop()
            found.append((row.start, value(alive)))
        starts = [start for start, _ in found]
        place = max(0, bisect_right(starts, offset_s) - 1)
        moment, turn, last = 0.0, 0, None
        while moment < until_s:
            if found[place][1] != last:
                last = found[place][1]
                yield moment, last
            place += 1
            if place == len(found):
                place, turn = 0, turn + 1
            moment = turn * self.length_s + starts[place] - offset_s
