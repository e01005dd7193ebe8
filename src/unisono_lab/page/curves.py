"""The figures of a run over its steps, of the lines of ``metrics.jsonl``: columns that never take much room."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unisono.adapt.curvature_question import CONFIDENCE, FIGURES
from unisono_lab.page.source import METRICS, Follower, NewLines, Read

# A row of items that grows for ever and never takes much room.


T = TypeVar("T")

MOST = 1024
"""Groups that are kept; a plot has about as many pixels."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How much of a row somebody has seen.

    Attributes:
        shape: the shape that the row had then.
        count: the number of items of a row then, or of entries of a table.
    """

    shape: int = -1
    count: int = 0


class Thinned(Generic[T]):
    """Groups of neighbouring items, all of one size but the newest. When there are too many, each two become one.

    Args:
        merge: a function that makes one item of two neighbours, the earlier one first.
        most: the number of groups that are kept; even.

    Attributes:
        groups: the groups, in their order.
        stride: the number of items in each.
        shape: a number that changes with every group at once.
        count: the number of items.
    """

    def __init__(self, merge: Callable[[T, T], T], most: int = MOST) -> None:
        self.groups: list[T] = []
        self.stride, self.shape, self.count = 1, 0, 0
        self._merge, self._most = merge, most

    def add(self, item: T) -> None:
        """One more item, the newest."""
        if self.count == self._most * self.stride:
            self._halve()
        if self.count % self.stride:
            self.groups[-1] = self._merge(self.groups[-1], item)
        else:
            self.groups.append(item)
        self.count += 1

    @property
    def mark(self) -> Mark:
        """Of who has seen all that there is."""
        return Mark(self.shape, self.count)

    def since(self, seen: Mark) -> int:
        """The number of the first group that is new, or may have changed, for somebody."""
        return seen.count // self.stride if seen.shape == self.shape else 0

    def _halve(self) -> None:
        pairs = zip(self.groups[::2], self.groups[1::2], strict=True)
        self.groups = [self._merge(earlier, later) for earlier, later in pairs]
        self.stride, self.shape = 2 * self.stride, self.shape + 1


# The figures of a run over its steps, of the lines of ``metrics.jsonl``: columns that never take much room.


MOST_CURVES = 96
"""More names than that are not drawn: whoever logs them has made a mistake, or means harm."""

LARGEST, LARGEST_STEP = 1e290, 2**53

EMPTY = (np.inf, -np.inf, 0.0, 0.0)
"""The smallest value, the largest one, the sum and the number of no values."""

MERGES = (np.minimum, np.maximum, np.add, np.add)
MANY = 3


class Entry(NamedTuple):
    """What a line tells of a step.

    Attributes:
        step: the number of the step.
        time: the time of the line, in seconds since 1970; None if it has none.
        figures: the values by name; anything but a finite number is left out.
    """

    step: int
    time: float | None
    figures: Mapping[str, Any]


class CurveTable:
    """Figures by name, in groups of neighbouring steps that all figures share.

    All groups are of as many steps, but the newest. When there are too many, each two become one. Entries in a row that
    are of the same step count as one step.

    Attributes:
        names: the names of the figures, each with its row.
        stride: the number of steps in each group.
        left_out: whether there are more names than are drawn.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.stride, self.left_out = 1, False
        self._shape = self._steps = self._entries = 0
        self._step, self._time = np.zeros(MOST), np.full(MOST, np.nan)
        self._until = np.zeros(MOST, np.int64)  # the number of entries up to the end of each group
        self._figures = np.empty((4, MOST_CURVES, MOST))
        self._figures[:] = np.reshape(EMPTY, (4, 1, 1))

    def __len__(self) -> int:
        """The number of groups."""
        return (self._steps + self.stride - 1) // self.stride

    def add(self, entries: Sequence[Entry]) -> None:
        """Take the next entries."""
        if not entries:
            return
        for one in entries:
            self._learn(one.figures)
        steps = np.array([one.step for one in entries], float)
        times = np.array([np.nan if one.time is None else one.time for one in entries])
        before = self._step[len(self) - 1] if self._steps else -1.0
        places = self._steps - 1 + np.cumsum(np.diff(steps, prepend=before) != 0)  # of each entry's step
        while places[-1] >= self.stride * MOST:
            self._halve()
        groups = places // self.stride
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        where = slice(groups[0], groups[-1] + 1)
        ends = np.append(starts[1:], len(entries)) - 1
        self._step[where], self._time[where] = steps[ends], times[ends]
        self._until[where] = self._entries + ends + 1
        values = [_numbers([one.figures.get(name) for one in entries]) for name in self.names]
        self._take(where, np.array(values, float).reshape(-1, len(entries)), starts)
        self._steps, self._entries = int(places[-1]) + 1, self._entries + len(entries)

    def since(self, seen: Mark) -> dict[str, Any]:
        """The groups that somebody has not seen, or not as they are now, for the browser.

        Returns:
            the number of the first of these groups, their newest steps and times, and the values in them by name: None,
            a number, or the smallest value, the largest one and the mean of several. Empty if nothing is new.
        """
        if seen == self.mark or not self._entries:
            return {}
        count = len(self)
        first = int(np.searchsorted(self._until[:count], seen.count, "right")) if seen.shape == self._shape else 0
        low, high, total, many = self._figures[:, : len(self.names), first:count]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            told = _rounded(np.stack([low, high, total / many]))
        values = {
            name: [
                mean if n == 1 else [least, most, mean] if n else None
                for n, least, most, mean in zip(many[row].tolist(), *told[:, row].tolist(), strict=True)
            ]
            for name, row in self.names.items()
            if many[row].any()
        }
        times = [None if time != time else time for time in self._time[first:count].tolist()]
        return {"first": first, "steps": self._step[first:count].astype(int).tolist(), "times": times, "values": values}

    @property
    def mark(self) -> Mark:
        """Of who has seen all that there is."""
        return Mark(self._shape, self._entries)

    def _learn(self, figures: Mapping[str, Any]) -> None:
        """Give new names their rows."""
        for name in [name for name in figures if name not in self.names]:
            if number(figures[name]) is None:
                continue
            if len(self.names) == MOST_CURVES:
                self.left_out = True
                return
            self.names[name] = len(self.names)

    def _take(self, where: slice, values: NDArray[np.float64], starts: NDArray[np.intp]) -> None:
        known = np.abs(values) < LARGEST  # also not where it is NaN
        parts = [np.where(known, values, empty) for empty in EMPTY[:MANY]] + [known.astype(float)]
        new = [how.reduceat(part, starts, axis=1) for how, part in zip(MERGES, parts, strict=True)]
        _merge(self._figures[:, : len(values), where], new)

    def _halve(self) -> None:
        count, half = len(self), MOST // 2
        for column in (self._step, self._time, self._until):
            newest = column[count - 1]
            column[:half] = column[1::2]
            column[-(-count // 2) - 1] = newest  # its group may have no neighbour
        earlier = self._figures[:, :, ::2].copy()
        _merge(earlier, self._figures[:, :, 1::2])
        self._figures[:, :, :half] = earlier
        self._figures[:, :, half:] = np.reshape(EMPTY, (4, 1, 1))
        self.stride, self._shape = 2 * self.stride, self._shape + 1


def number(value: Any) -> float | None:
    """A finite number that a browser can draw, and of which many can be added up; None for anything else."""
    if type(value) not in (float, int) or not -LARGEST < value < LARGEST:  # also for NaN
        return None
    return float(value)


def _numbers(values: list[Any]) -> list[Any]:
    """Values of which an array can be made; the quick way is for what a step nearly always has."""
    return values if {*map(type, values)} <= {float, type(None)} else [number(value) for value in values]


def _merge(groups: NDArray[np.float64], others: Sequence[NDArray[np.float64]] | NDArray[np.float64]) -> None:
    for how, group, other in zip(MERGES, groups, others, strict=True):
        how(group, other, out=group)


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Six digits of each, so that what is sent is short."""
    scale = 10.0 ** (5 - np.floor(np.log10(np.abs(values))))
    found = np.round(values * scale) / scale
    return np.where(np.isfinite(found), found, values)


OWN = frozenset(
    (
        *("step", "epoch", "position", "loss", "losses", "lr", "generation", "world_size", "seconds", "samples_per_s"),
        *("batch_size", "shards", "ends_epoch", "learning_rate", "lr_factor", "workers", "links", "setting", "norms"),
        *("strategy", "round", "time", "shard_s", "gradient_norm", "gradient_variance", "gradient_signal"),
        *("noise_scale", "ada_scale_gain", "loss_variance"),
        *FIGURES,
    )
)
"""Fields of a line that no script has logged."""

DRAWN = frozenset(("loss", "samples_per_s", "batch_size", "noise_scale", "gradient_norm", *FIGURES))
PARTS = ("data", "compute", "exposed_communication", "update", "total")
"""Of ``seconds``."""

MOST_RANKS = 8
"""Workers whose seconds per shard are drawn over time; the newest ones of all are told."""

LONGEST_NAME = 80


class Curves:
    """Figures by name. Names that a script has given begin with ``metric/``.

    Attributes:
        table: the figures.
        latest: the newest line of a step.
    """

    def __init__(self) -> None:
        self.table = CurveTable()
        self.latest: Mapping[str, Any] = {}

    def take(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take the next lines; what is not as it should be in them is left out."""
        entries = list[Entry]()
        for line in lines:
            step, time = line.get("step"), number(line.get("time"))
            if type(step) is not int or not 0 <= step < LARGEST_STEP:
                continue
            others = [name for name in line if name not in OWN]
            layers = [name for name in others if name.startswith(CONFIDENCE)]  # drawn as one figure, with its range
            figures = {
                f"metric/{name[:LONGEST_NAME]}": line[name] for name in others if not name.startswith(CONFIDENCE)
            }
            if "loss" in line:
                self.latest = line
                figures |= _of_step(line)
            entries += [Entry(step, time, figures), *(Entry(step, time, {"confidence": line[name]}) for name in layers)]
        self.table.add(entries)


def _of_step(line: Mapping[str, Any]) -> dict[str, Any]:
    figures = {name: value for name, value in line.items() if name in DRAWN}
    figures["lr"] = line.get("learning_rate", line.get("lr"))
    if isinstance(seconds := line.get("seconds"), Mapping):
        figures |= {f"seconds/{name}": seconds.get(name) for name in PARTS}
    return figures | {f"shard_s/{rank}": value for rank, value in enumerate(shard_seconds(line)[:MOST_RANKS])}


def shard_seconds(line: Mapping[str, Any]) -> list[float | None]:
    """The seconds of one shard on each worker, by rank; empty if the line does not tell."""
    told, workers = line.get("shard_s"), line.get("workers")
    if isinstance(workers, list):
        told = [one.get("shard_s") if isinstance(one, Mapping) else None for one in workers]
    return [number(value) for value in told] if isinstance(told, list) else []


# The curves of a few steps, finer than those of the whole run: made again of the lines that these steps have.


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
        steps, times = (
            [found for line in news.lines if (found := number(line.get(name))) is not None] for name in ("step", "time")
        )
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


def _joined(one: _Stretch, other: _Stretch) -> _Stretch:
    (low, high), (since, until) = one.step, one.time
    step = min(low, other.step[0]), max(high, other.step[1])
    return _Stretch(one.first, other.end, step, (min(since, other.time[0]), max(until, other.time[1])))
