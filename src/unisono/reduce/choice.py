"""Which topology carries buckets of which size: by what was measured between these workers."""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from unisono.reduce.buckets import Bucket

REPETITIONS = 5
"""At most so many for each topology; the shortest counts."""

ENOUGH_S = 0.2
"""Seconds after which a topology is not repeated."""

Trial = Callable[[], float]
"""Reduces a bucket once; returns the seconds of the slowest worker, the same number on every worker."""


class Choice:
    """Takes the fastest topology for each class of sizes; a class is a power of two of bytes.

    Every worker gets the same numbers from its trials, and so decides alike.

    Args:
        names: the topologies to choose from. The first is taken as long as nothing is measured.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._seconds: dict[int, dict[str, float]] = {}

    def topology(self, size: int) -> str:
        """The one to take for a bucket of ``size`` bytes: the fastest for what was measured of about that size."""
        if not self._seconds:
            return self._names[0]
        seconds = self._seconds[min(self._seconds, key=lambda known: abs(known - size.bit_length()))]
        return min(seconds, key=lambda name: seconds[name])

    def open(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """The largest bucket of each class about which nothing is known yet, from small to large."""
        largest: dict[int, Bucket] = {}
        for bucket in sorted(buckets, key=_size):
            largest[_size(bucket).bit_length()] = bucket
        unknown = [bucket for known, bucket in largest.items() if known not in self._seconds]
        return unknown if len(self._names) > 1 else []

    def measure(self, bucket: Bucket, trial: Callable[[str], Trial]) -> dict[str, float]:
        """Try every topology on buckets of this one's class.

        Args:
            bucket: of the class.
            trial: gives a topology the buffers it needs.

        Returns:
            the seconds of each.
        """
        seconds: dict[str, float] = {}
        for name in self._names:
            once, best, spent = trial(name), inf, 0.0
            for _ in range(REPETITIONS):
                if spent < ENOUGH_S:
                    last = once()
                    best, spent = min(best, last), spent + last
            seconds[name] = best
        self._seconds[_size(bucket).bit_length()] = seconds
        return seconds


def _size(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize
