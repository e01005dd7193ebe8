"""The search for the largest batch that fits, as a pure function of what was tried: doubling, then bisection.

The same trials always lead to the same next one, so the search is tested with memories that are made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal

from unisono.errors import JobError
from unisono_lab.analysis.batch_curve import Tried

FIRST = 16
MARGIN = 0.1
RESOLUTION = 0.02
"""Bisection ends when the largest batch that fits is known to this share of itself."""

Bound = Literal["memory", "data", "most"]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer.

    Attributes:
        largest: batch that fits; None if none does.
        with_margin: the largest that leaves the margin; it was tried, too.
        best: the batch with the best throughput among those that leave the margin; None if none could be timed.
        bound: the reason why the largest is not larger.
    """

    largest: int | None
    with_margin: int | None = None
    best: int | None = None
    bound: Bound = "memory"


@dataclass(frozen=True, slots=True)
class BatchSearch:
    """The settings of a search for the largest batch.

    Attributes:
        workers: the number of workers.
        first: the batch per worker to begin with.
        most: the largest to try; None without such a bound.
        margin: share of the largest batch by which the recommended ones stay below it.
    """

    workers: int = 1
    first: int = FIRST
    most: int | None = None
    margin: float = MARGIN

    def check(self) -> None:
        """Refuse what cannot work, before anything is started.

        Raises:
            JobError: a number is out of range; names it.
        """
        for name, value in (("workers", self.workers), ("from", self.first)):
            if value < 1:
                raise JobError(f"--{name} {value}: at least 1 is needed")
        if self.most is not None and self.most < self.first:
            raise JobError(f"--most {self.most}: less than --from {self.first}, where the search begins")
        if not 0 <= self.margin < 1:
            raise JobError(f"--margin {self.margin:g}: a share of the largest batch, from 0 and below 1")

    def next(self, trials: Mapping[int, Tried]) -> int | Found:
        """The batch to try next, or the answer.

        Args:
            trials: the trials so far, by batch.
        """
        known = _Known(self, trials)
        if (batch := known.wanted()) is not None:
            return batch
        largest = known.low
        if largest is None:
            return Found(None)
        with_margin = known.below(largest * (1 - self.margin)) if known.bound == "memory" else largest
        if with_margin not in trials:
            return with_margin
        timed = [one for one in trials.values() if one.fits and one.samples_per_s and one.batch <= with_margin]
        best = max(timed, key=lambda one: (one.samples_per_s or 0.0, -one.batch), default=None)
        return Found(largest, with_margin, None if best is None else best.batch, known.bound)


class _Known:
    """The bounds of the largest batch, from trials. Where they contradict each other, the smaller failure counts."""

    def __init__(self, search: BatchSearch, trials: Mapping[int, Tried]) -> None:
        shards = [one.shards for one in trials.values() if one.shards]
        data = [one.data_samples // search.workers for one in trials.values() if one.data_samples]
        self._first = search.first
        # Batches of which every shard has equally many samples: a larger one decides what memory is needed.
        self.unit = max((each // gcd(each, search.workers) for each in shards), default=1)
        self._data, self._wished = min(data, default=None), search.most
        limits = [limit for limit in (self._data, self._wished) if limit is not None]
        self.most = max(self._multiple(min(limits)), 1) if limits else None
        within = [one for one in trials.values() if self.most is None or one.batch <= self.most]
        self.high = min((one.batch for one in within if not one.fits), default=None)
        fitting = [one.batch for one in within if one.fits and (self.high is None or one.batch < self.high)]
        self.low = max(fitting, default=None)

    @property
    def bound(self) -> Bound:
        """What ends the search upwards."""
        if self.high is not None or self.low != self.most:
            return "memory"
        return "data" if self._wished is None or (self._data or self._wished) < self._wished else "most"

    def wanted(self) -> int | None:
        """The next batch to look at; None if the largest is known well enough."""
        if self.low is None:
            return self._downwards()
        if self.high is None:
            if self.most is not None and self.low >= self.most:
                return None
            larger = max(self._multiple(2 * self.low), self.unit)
            return larger if self.most is None else min(larger, self.most)
        gap = self.high - self.low
        if gap <= max(self.unit, self.low * RESOLUTION):
            return None
        middle = self._multiple(self.low + gap // 2)
        return middle if middle > self.low else middle + self.unit

    def below(self, batch: float) -> int:
        """The largest batch up to this one that is worth trying; the largest that fits, if there is none."""
        assert self.low is not None, "a batch fits"
        whole = int(batch) // self.unit * self.unit
        return whole or self.low

    def _downwards(self) -> int | None:
        if self.high is None:
            return self._first if self.most is None else min(self._first, self.most)
        return None if self.high <= self.unit else max(self._multiple(self.high // 2), self.unit)

    def _multiple(self, batch: int) -> int:
        return batch // self.unit * self.unit or batch
