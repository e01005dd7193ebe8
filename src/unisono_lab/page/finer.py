"""The curves of a few steps, finer than those of the whole run: made again of the lines that these steps have."""

from typing import Any, Literal, NamedTuple

from unisono_lab.page.curves import Curves, number
from unisono_lab.page.follow import Follower, NewLines, Read
from unisono_lab.page.source import METRICS
from unisono_lab.page.thinned import Mark, Thinned

Axis = Literal["step", "time"]

MOST_BYTES = 2**27
"""Of the file that are read for one range, some 300 000 steps: of a wider one the thinned points are fine enough."""


class _Stretch(NamedTuple):
    """Lines that follow each other: their bytes, and the smallest and largest of their steps and times."""

    first: int
    end: int
    step: tuple[float, float]
    time: tuple[float, float]


class Stretches:
    """Where in the file of metrics which steps are, roughly.

    Args:
        most: the largest number of bytes that a range may have.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._known: Thinned[_Stretch] = Thinned(_joined)

    def add(self, news: NewLines) -> None:
        """The next lines of the file."""
        steps, times = _numbers(news, "step"), _numbers(news, "time")
        if steps and times:
            bounds = (min(steps), max(steps)), (min(times), max(times))
            self._known.add(_Stretch(news.first, news.end, *bounds))

    def of(self, axis: Axis, low: float, high: float) -> tuple[int, int]:
        """The first byte of a range, and the one behind it; the same if there is nothing, or far too much."""
        found = [one for one in self._known.groups if getattr(one, axis)[0] <= high and getattr(one, axis)[1] >= low]
        first, end = (found[0].first, found[-1].end) if found else (0, 0)
        return (first, end) if end - first <= self._most else (0, 0)


class FinerCurves:
    """Reads a range, part by part.

    Args:
        axis: what the range is of.
        low: its lower end.
        high: its upper end.
        stretch: the first byte, and the one behind, between which its lines are.
    """

    def __init__(self, axis: Axis, low: float, high: float, stretch: tuple[int, int]) -> None:
        self._axis, self._low, self._high = axis, low, high
        self._at, self._end = stretch
        self._file, self._curves = Follower(METRICS, self._at), Curves()

    def take(self, read: Read) -> bool:
        """Take the next part; whether there is another one."""
        if self._at >= self._end:
            return False
        news = self._file.news(read)
        if news.anew:  # it is another file by now, whose lines are elsewhere
            return False
        self._curves.take([line for line in news.lines if self._is_inside(number(line.get(self._axis)))])
        self._at = news.end or self._at
        return self._at < self._end and (news.more or bool(news.lines))

    def points(self) -> dict[str, Any]:
        """The points of all curves, as the browser gets those of the whole run; empty if there are none."""
        return self._curves.table.since(Mark())

    def _is_inside(self, where: float | None) -> bool:
        return where is not None and self._low <= where <= self._high


def _numbers(news: NewLines, name: str) -> list[float]:
    return [found for line in news.lines if (found := number(line.get(name))) is not None]


def _joined(one: _Stretch, other: _Stretch) -> _Stretch:
    (low, high), (since, until) = one.step, one.time
    step = min(low, other.step[0]), max(high, other.step[1])
    return _Stretch(one.first, other.end, step, (min(since, other.time[0]), max(until, other.time[1])))
