"""What repeated measurements say: medians, ratios with intervals, and whether all computed the same. Pure."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

DRAWS = 2000
COVERED = 0.95

LOSSES_COMPARED = 4
"""One pass over the data. Later ones drift apart by themselves: each step amplifies what rounding began."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio, and the interval in which a repetition of the benchmark would find it 95 times out of 100."""

    value: float
    low: float
    high: float

    def __format__(self, digits: str) -> str:
        if self.low == self.high:  # compared with itself, or measured once
            return format(self.value, digits)
        return f"{self.value:{digits}} ({self.low:{digits}} … {self.high:{digits}})"


def bootstrap(sample: Sequence[T], statistic: Callable[[Sequence[T]], float]) -> Ratio:
    """A statistic of a sample, with the interval that drawing the sample again from itself gives."""
    generator = random.Random(0)  # noqa: S311  nothing is kept secret here
    drawn = sorted(statistic(generator.choices(sample, k=len(sample))) for _ in range(DRAWS))
    outside = int((1 - COVERED) / 2 * DRAWS)
    return Ratio(statistic(sample), drawn[outside], drawn[DRAWS - 1 - outside])


def times_as_fast(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of the medians. Both are seconds, one for each round; a round is drawn as a whole."""
    rounds = list(zip(ours, theirs, strict=True))
    return bootstrap(rounds, lambda drawn: _median([b for _, b in drawn]) / _median([a for a, _ in drawn]))


def times_as_long(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Ratio:
    """The median of the ratios of turns that stood side by side. For each run its turns; a run is drawn as a whole."""
    runs = [[a / b for a, b in zip(*turns, strict=True)] for turns in zip(ours, theirs, strict=True)]
    return bootstrap(runs, lambda drawn: _median([ratio for run in drawn for ratio in run]))


def slowest(workers: Sequence[Sequence[float]]) -> float:
    """A run's figure: the median over its steps, of the worker for which that is largest."""
    return max(_median(seconds) for seconds in workers)


def slowest_turns(workers: Sequence[Sequence[float]]) -> list[float]:
    """The seconds of each turn, of the worker for which it took longest."""
    return [max(turn) for turn in zip(*workers, strict=True)]


def mean_of_workers(workers: Sequence[Sequence[float]]) -> list[float]:
    """The loss of each step, over the samples of all workers, which have equally many."""
    return [statistics.fmean(step) for step in zip(*workers, strict=True)]


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference among the first losses."""
    pairs = list(zip(losses, reference, strict=False))[:LOSSES_COMPARED]
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def counted(count: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
