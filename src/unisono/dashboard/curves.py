"""The figures of a run over its steps, made of the lines of ``metrics.jsonl``."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from unisono.adapt.curvature_question import CONFIDENCE, FIGURES
from unisono.dashboard.thinned import Mark, Thinned

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

DRAWN = ("loss", "samples_per_s", "batch_size", "noise_scale", "gradient_norm", *FIGURES)
PARTS = ("data", "compute", "exposed_communication", "update", "total")
"""Of ``seconds``."""

MOST_CURVES = 96
"""More names than that are not drawn: whoever logs them has made a mistake, or means harm."""

MOST_RANKS = 8
"""Workers whose seconds per shard are drawn over time; the newest ones of all are told."""

LONGEST_NAME = 80
LARGEST_STEP = 2**53


class Point(NamedTuple):
    """A figure in some steps that follow each other.

    Attributes:
        step: the newest of the steps.
        time: the time of its line, in seconds since 1970; None if the line has none.
        low: the smallest value.
        high: the largest value.
        total: the sum of all values.
        many: the number of values.
    """

    step: int
    time: float | None
    low: float
    high: float
    total: float
    many: int

    @property
    def row(self) -> list[float | None]:
        """For the browser: step, time, smallest and largest value, mean."""
        if self.many == 1:
            value = _rounded(self.total)
            return [self.step, self.time, value, value, value]
        return [self.step, self.time, *map(_rounded, (self.low, self.high, self.total / self.many))]


def _merged(one: Point, other: Point) -> Point:
    low, high = min(one.low, other.low), max(one.high, other.high)
    return Point(other.step, other.time, low, high, one.total + other.total, one.many + other.many)


class Curves:
    """Figures by name, each thinned out. Names that a script has given begin with ``metric/``.

    Attributes:
        points: the points of each figure.
        latest: the newest line of a step.
        left_out: whether there are more names than are drawn.
    """

    def __init__(self) -> None:
        self.points: dict[str, Thinned[Point]] = {}
        self.latest: Mapping[str, Any] = {}
        self.left_out = False

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line; what is not as it should be in it is left out."""
        step, time = line.get("step"), number(line.get("time"))
        if type(step) is not int or not 0 <= step < LARGEST_STEP:
            return
        if "loss" in line:
            self.latest = line
            for name, value in _of_step(line):
                self.put(name, step, time, value)
        layers = list[Any]()
        for name, value in line.items():
            if name in OWN:
                continue
            if name.startswith(CONFIDENCE):
                layers.append(value)
            else:
                self.put(f"metric/{name[:LONGEST_NAME]}", step, time, value)
        self.put("confidence", step, time, *layers)

    def put(self, name: str, step: int, time: float | None, *values: Any) -> None:
        """Take a figure, or several that are drawn as one with its range; nothing of what is no finite number."""
        if len(values) == 1:  # nearly always, and some twenty times for each step
            if (value := number(values[0])) is None:
                return
            figures = value, value, value, 1
        else:
            found = [one for one in map(number, values) if one is not None]
            if not found:
                return
            figures = min(found), max(found), sum(found), len(found)
        points = self.points.get(name)
        if points is None:
            if len(self.points) >= MOST_CURVES:
                self.left_out = True
                return
            points = self.points[name] = Thinned(_merged)
        points.add(Point(step, time, *figures))

    def since(self, seen: dict[str, Mark]) -> dict[str, Any]:
        """For the browser: what somebody has not seen yet, by name. Notes in ``seen`` that he has."""
        told = {}
        for name, points in self.points.items():
            before = seen.get(name, Mark())
            if before == points.mark and points.stride == 1:
                continue  # nothing is added to a group of one
            first = points.since(before)
            told[name] = {"first": first, "rows": [point.row for point in points.groups[first:]]}
            seen[name] = points.mark
        return told


def _of_step(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in DRAWN:
        yield name, line.get(name)
    yield "lr", line.get("learning_rate", line.get("lr"))
    seconds = line.get("seconds")
    if isinstance(seconds, Mapping):
        for name in PARTS:
            yield f"seconds/{name}", seconds.get(name)
    for rank, value in enumerate(shard_seconds(line)[:MOST_RANKS]):
        yield f"shard_s/{rank}", value


def shard_seconds(line: Mapping[str, Any]) -> list[float | None]:
    """The seconds of one shard on each worker, by rank; empty if the line does not tell."""
    told, workers = line.get("shard_s"), line.get("workers")
    if isinstance(workers, list):
        told = [one.get("shard_s") if isinstance(one, Mapping) else None for one in workers]
    return [number(value) for value in told] if isinstance(told, list) else []


def number(value: Any) -> float | None:
    """A finite number that a browser can draw; None for anything else."""
    if type(value) not in (int, float) or not abs(value) < 1e300:  # also for NaN
        return None
    return float(value)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
