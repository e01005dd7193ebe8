"""The sources of a page, and the figures of a run over its steps, in columns of limited size."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unisono.adapt.norms import CONFIDENCE, FIGURES
from unisono.errors import JobError, Unreadable
from unisono.launch.elastic.address import WHERE, Address, Control, address_of
from unisono.received import parse_json, read_part

JOURNAL, METRICS, JOB, RESULT = "journal.jsonl", "metrics.jsonl", "job.json", "result.json"


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A run folder on this host.

    Attributes:
        certificate: the certificate that the coordinator shows, if it is not the one in the folder.
    """

    folder: Path
    certificate: Path | None = None

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.absolute().name

    poll_s: ClassVar[float] = 0.3
    """The seconds between looks at the journal; few, since looking at an unchanged file is cheap."""

    def stamp(self, name: str) -> object:
        """A value that changes whenever the file does: inode, length and time of change; None if it cannot be read."""
        try:
            status = (self.folder / name).stat()
        except OSError:  # reading the file raises the error
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, name: str, first: int, most: int) -> bytes:
        """Some bytes of a file of the run folder; none if there is no such file.

        Raises:
            JobError: the file cannot be read.
        """
        try:
            return read_part(self.folder / name, first, most)
        except (OSError, Unreadable) as error:
            raise JobError(f"{self.folder / name} cannot be read: {error}") from error

    def control(self) -> Control | None:
        """The control of the running coordinator; None if there is none."""
        if not (self.folder / WHERE).exists():
            return None
        return Control(address_of(self.folder, self.certificate))


@dataclass(frozen=True, slots=True)
class CoordinatorSource:
    """A job whose coordinator runs on another host."""

    address: Address

    @property
    def name(self) -> str:
        """The coordinator's URL."""
        return self.address.url

    poll_s: ClassVar[float] = 0.5
    """The seconds between looks at the journal; more, since each look is a connection to the coordinator."""

    def stamp(self, name: str) -> None:
        """None: the coordinator does not report whether a file has changed."""

    def read(self, name: str, first: int, most: int) -> bytes:
        """Some bytes of a file of the coordinator's run folder.

        Raises:
            LaunchError: the coordinator does not answer.
        """
        return self.control().record(name, first, most)

    def control(self) -> Control:
        """The control of the coordinator."""
        return Control(self.address)


RunSource = FolderSource | CoordinatorSource
"""A run that can be read and controlled."""


# Following a file of JSON lines, which other processes append to, and sometimes replace.


PART = 2**18
"""The number of bytes that are read at once."""

LONGEST_LINE = 2**24

Read = Callable[[str, int, int], bytes]
"""Reads bytes of a file of the run folder, given its name, the first byte, and the most bytes. Fewer bytes are the end
of the file; none may mean that there is no such file."""


@dataclass(frozen=True, slots=True)
class NewLines:
    """The new lines of a file.

    Attributes:
        lines: the objects in the new lines. Damaged lines are left out.
        anew: whether the file was replaced, so that it is read from its beginning.
        more: whether there is more to read at once.
        first: the place of the first byte of these lines in the file.
        end: the place of the byte behind them.
    """

    lines: list[dict[str, Any]]
    anew: bool = False
    more: bool = False
    first: int = 0
    end: int = 0


class Follower:
    """Reads the new lines of a file, from the byte ``first`` on; notices by the last line whether it was replaced."""

    def __init__(self, name: str, first: int = 0) -> None:
        self._name = name
        self._at = first
        self._last = b""
        self._most = PART

    def news(self, read: Read) -> NewLines:
        """Read the lines since the last call."""
        known_bytes = len(self._last)
        data = read(self._name, self._at - known_bytes, known_bytes + self._most)
        if not data.startswith(self._last):
            self._at, self._last, self._most = 0, b"", PART
            return NewLines([], anew=True, more=True)
        new = data[known_bytes:]
        end = new.rfind(b"\n") + 1
        is_full = len(new) == self._most
        if end == 0:
            if is_full:
                self._make_room(new)
            return NewLines([], more=is_full)
        lines = new[:end].splitlines(keepends=True)
        first, self._at, self._last, self._most = self._at, self._at + end, lines[-1][-PART:], PART
        objects = [parsed for line in lines if (parsed := _object(line)) is not None]
        return NewLines(objects, more=is_full, first=first, end=self._at)

    def _make_room(self, part: bytes) -> None:
        """Read more at once, since a line is longer than what was read; a line that is too long is skipped."""
        if self._most < LONGEST_LINE:
            self._most *= 2
        else:
            self._at, self._last = self._at + len(part), part[-PART:]


def _object(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):
        value = parse_json(line)
        return value if isinstance(value, dict) else None
    return None


# A growing row of items in limited memory.


T = TypeVar("T")

MOST = 1024
"""The number of groups that are kept; a plot has about as many pixels."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The part of a row or table that a viewer has seen."""

    shape: int = -1
    count: int = 0


class Thinned(Generic[T]):
    """Groups of neighbouring items, all of one size but the newest. When there are too many, pairs are merged.

    Args:
        merge: a function that makes one item of two neighbours, the earlier one first.
        most: the number of groups that are kept; even.

    Attributes:
        stride: the number of items in each group.
        shape: a number that changes when all groups change.
    """

    def __init__(self, merge: Callable[[T, T], T], most: int = MOST) -> None:
        self.groups: list[T] = []
        self.stride, self.shape, self.count = 1, 0, 0
        self._merge, self._most = merge, most

    def add(self, item: T) -> None:
        """Add the newest item."""
        if self.count == self._most * self.stride:
            self._halve()
        if self.count % self.stride:
            self.groups[-1] = self._merge(self.groups[-1], item)
        else:
            self.groups.append(item)
        self.count += 1

    @property
    def mark(self) -> Mark:
        """The mark of a viewer that has seen everything."""
        return Mark(self.shape, self.count)

    def since(self, seen: Mark) -> int:
        """The place of the first group that is new, or may have changed, since a mark."""
        return seen.count // self.stride if seen.shape == self.shape else 0

    def _halve(self) -> None:
        pairs = zip(self.groups[::2], self.groups[1::2], strict=True)
        self.groups = [self._merge(earlier, later) for earlier, later in pairs]
        self.stride, self.shape = 2 * self.stride, self.shape + 1


# The figures of a run over its steps, in columns of limited size.


MOST_CURVES = 96
"""The most names that are drawn; a script that logs more has an error, or is malicious."""

LARGEST, LARGEST_STEP = 1e290, 2**53

EMPTY = (np.inf, -np.inf, 0.0, 0.0)
"""The smallest value, the largest one, the sum and the number of no values."""

MERGES = (np.minimum, np.maximum, np.add, np.add)
MANY = 3


class Entry(NamedTuple):
    """The figures of a step in a line.

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

    All groups but the newest have the same number of steps. When there are too many, pairs are merged. Successive
    entries of the same step count as one step.

    Attributes:
        stride: the number of steps in each group.
        left_out: whether names were left out, since there are too many.
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
        """Add the next entries."""
        if not entries:
            return
        for entry in entries:
            self._learn(entry.figures)
        steps = np.array([entry.step for entry in entries], float)
        times = np.array([np.nan if entry.time is None else entry.time for entry in entries])
        before = self._step[len(self) - 1] if self._steps else -1.0
        places = self._steps - 1 + np.cumsum(np.diff(steps, prepend=before) != 0)  # the number of each entry's step
        while places[-1] >= self.stride * MOST:
            self._halve()
        groups = places // self.stride
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        where = slice(groups[0], groups[-1] + 1)
        ends = np.append(starts[1:], len(entries)) - 1
        self._step[where], self._time[where] = steps[ends], times[ends]
        self._until[where] = self._entries + ends + 1
        values = [_numbers([entry.figures.get(name) for entry in entries]) for name in self.names]
        self._take(where, np.array(values, float).reshape(-1, len(entries)), starts)
        self._steps, self._entries = int(places[-1]) + 1, self._entries + len(entries)

    def since(self, seen: Mark) -> dict[str, Any]:
        """The groups that are new, or have changed, since a mark, for the browser.

        Returns:
            the place of the first of these groups, their newest steps and times, and their values by name: None, a
            number, or the smallest, the largest and the mean of several. Empty if nothing is new.
        """
        if seen == self.mark or not self._entries:
            return {}
        count = len(self)
        first = int(np.searchsorted(self._until[:count], seen.count, "right")) if seen.shape == self._shape else 0
        low, high, total, counts = self._figures[:, : len(self.names), first:count]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            rounded = _rounded(np.stack([low, high, total / counts]))
        values = {
            name: [
                mean if n == 1 else [least, most, mean] if n else None
                for n, least, most, mean in zip(counts[row].tolist(), *rounded[:, row].tolist(), strict=True)
            ]
            for name, row in self.names.items()
            if counts[row].any()
        }
        times = [None if time != time else time for time in self._time[first:count].tolist()]
        return {"first": first, "steps": self._step[first:count].astype(int).tolist(), "times": times, "values": values}

    @property
    def mark(self) -> Mark:
        """The mark of a viewer that has seen everything."""
        return Mark(self._shape, self._entries)

    def _learn(self, figures: Mapping[str, Any]) -> None:
        """Assign rows to new names."""
        for name in [name for name in figures if name not in self.names]:
            if number(figures[name]) is None:
                continue
            if len(self.names) == MOST_CURVES:
                self.left_out = True
                return
            self.names[name] = len(self.names)

    def _take(self, where: slice, values: NDArray[np.float64], starts: NDArray[np.intp]) -> None:
        is_number = np.abs(values) < LARGEST  # False for NaN, too
        parts = [np.where(is_number, values, empty) for empty in EMPTY[:MANY]] + [is_number.astype(float)]
        new = [merge.reduceat(part, starts, axis=1) for merge, part in zip(MERGES, parts, strict=True)]
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
    """The value as a finite float that can be drawn, and many of which can be added; None if it is none."""
    if type(value) not in (float, int) or not -LARGEST < value < LARGEST:  # also for NaN
        return None
    return float(value)


def _numbers(values: list[Any]) -> list[Any]:
    """Values of which an array can be made; floats, which are the usual case, need no conversion."""
    return values if {*map(type, values)} <= {float, type(None)} else [number(value) for value in values]


def _merge(groups: NDArray[np.float64], others: Sequence[NDArray[np.float64]] | NDArray[np.float64]) -> None:
    for merge, group, other in zip(MERGES, groups, others, strict=True):
        merge(group, other, out=group)


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values with six digits, so that messages are short."""
    scale = 10.0 ** (5 - np.floor(np.log10(np.abs(values))))
    rounded = np.round(values * scale) / scale
    return np.where(np.isfinite(rounded), rounded, values)


OWN = frozenset(
    (
        *("step", "epoch", "position", "loss", "losses", "lr", "generation", "world_size", "seconds", "samples_per_s"),
        *("batch_size", "shards", "ends_epoch", "learning_rate", "lr_factor", "workers", "links", "setting", "norms"),
        *("strategy", "round", "time", "shard_s", "gradient_norm", "gradient_variance", "gradient_signal"),
        *("noise_scale", "ada_scale_gain", "loss_variance"),
        *FIGURES,
    )
)
"""The fields of a line that Unisono writes; all others were logged by the script."""

DRAWN = frozenset(("loss", "samples_per_s", "batch_size", "noise_scale", "gradient_norm", *FIGURES))
PARTS = ("data", "compute", "exposed_communication", "update", "total")
"""The fields of ``seconds`` that are shown."""

MOST_RANKS = 8
"""The number of workers whose seconds per shard are drawn over time; for the others only the newest is shown."""

LONGEST_NAME = 80


class Curves:
    """The curves of a run. Names of figures that the script logged begin with ``metric/``."""

    def __init__(self) -> None:
        self.table = CurveTable()
        self.latest: Mapping[str, Any] = {}

    def take(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take the next lines; values that are not valid are left out."""
        entries = list[Entry]()
        for line in lines:
            step, time = line.get("step"), number(line.get("time"))
            if type(step) is not int or not 0 <= step < LARGEST_STEP:
                continue
            logged = [name for name in line if name not in OWN]
            layers = [name for name in logged if name.startswith(CONFIDENCE)]  # drawn as one curve, with its range
            figures = {
                f"metric/{name[:LONGEST_NAME]}": line[name] for name in logged if not name.startswith(CONFIDENCE)
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
    """The seconds of one shard on each worker, by rank; empty if the line does not have them."""
    seconds, workers = line.get("shard_s"), line.get("workers")
    if isinstance(workers, list):
        seconds = [worker.get("shard_s") if isinstance(worker, Mapping) else None for worker in workers]
    return [number(value) for value in seconds] if isinstance(seconds, list) else []


# Finer curves of a range of steps, which are made again from the lines of these steps.


Axis = Literal["step", "time"]

MOST_BYTES = 2**27
"""The most bytes that are read for a range, some 300 000 steps; for a wider one the thinned points are fine enough."""


class _Stretch(NamedTuple):
    """The bytes of successive lines, and the smallest and largest of their steps and times."""

    first: int
    end: int
    step: tuple[float, float]
    time: tuple[float, float]


class Stretches:
    """The approximate places of steps in the file of metrics; a range has at most ``most`` bytes."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._stretches: Thinned[_Stretch] = Thinned(_joined)

    def add(self, news: NewLines) -> None:
        """Add the next lines of the file."""
        steps, times = (
            [value for line in news.lines if (value := number(line.get(name))) is not None] for name in ("step", "time")
        )
        if steps and times:
            bounds = (min(steps), max(steps)), (min(times), max(times))
            self._stretches.add(_Stretch(news.first, news.end, *bounds))

    def of(self, axis: Axis, low: float, high: float) -> tuple[int, int]:
        """The first byte of a range, and the byte behind it; both 0 if there is nothing, or too much."""
        stretches = [
            stretch
            for stretch in self._stretches.groups
            if getattr(stretch, axis)[0] <= high and getattr(stretch, axis)[1] >= low
        ]
        first, end = (stretches[0].first, stretches[-1].end) if stretches else (0, 0)
        return (first, end) if end - first <= self._most else (0, 0)


class FinerCurves:
    """Reads the curves of a range, part by part, from its first byte in the file to the one behind its lines."""

    def __init__(self, axis: Axis, low: float, high: float, stretch: tuple[int, int]) -> None:
        self._axis, self._low, self._high = axis, low, high
        self._at, self._end = stretch
        self._file, self._curves = Follower(METRICS, self._at), Curves()

    def take(self, read: Read) -> bool:
        """Read the next part; returns whether there is another one."""
        if self._at >= self._end:
            return False
        news = self._file.news(read)
        if news.anew:  # the file was replaced, so the places of its lines are no longer known
            return False
        self._curves.take([line for line in news.lines if self._is_inside(number(line.get(self._axis)))])
        self._at = news.end or self._at
        return self._at < self._end and (news.more or bool(news.lines))

    def points(self) -> dict[str, Any]:
        """The points of all curves, in the form of those of the whole run; empty if there are none."""
        return self._curves.table.since(Mark())

    def _is_inside(self, where: float | None) -> bool:
        return where is not None and self._low <= where <= self._high


def _joined(earlier: _Stretch, later: _Stretch) -> _Stretch:
    (low, high), (since, until) = earlier.step, earlier.time
    step = min(low, later.step[0]), max(high, later.step[1])
    return _Stretch(earlier.first, later.end, step, (min(since, later.time[0]), max(until, later.time[1])))
