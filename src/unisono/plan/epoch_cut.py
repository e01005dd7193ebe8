"""How the places of one epoch are cut into global batches."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class EpochCut(Protocol):
    """How an epoch is cut into batches, one behind the other from place 0 on."""

    @property
    def samples(self) -> int:
        """The number of samples in the epoch."""

    @property
    def used(self) -> int:
        """The number of samples that its batches use."""

    @property
    def steps(self) -> int:
        """The number of batches."""

    def stop(self, start: int) -> int | None:
        """Where the batch ends that starts at a place; None if no batch does."""

    def batch(self, number: int) -> range:
        """The places of a batch, by its number from 0."""


@dataclass(frozen=True, slots=True)
class EvenCut:
    """Batches of one size.

    Attributes:
        samples: the number of samples in the epoch.
        batch_size: the number of samples in a batch.
        drop_last: whether a last, smaller batch is left out.
    """

    samples: int
    batch_size: int
    drop_last: bool = False

    @property
    def used(self) -> int:
        """The number of samples that its batches use."""
        return self.samples - self.samples % self.batch_size if self.drop_last else self.samples

    @property
    def steps(self) -> int:
        """The number of batches."""
        return -(-self.used // self.batch_size)

    def stop(self, start: int) -> int | None:
        """Where the batch ends that starts at a place; None if no batch does."""
        least = self.batch_size if self.drop_last else 1
        return min(start + self.batch_size, self.samples) if self.samples - start >= least else None

    def batch(self, number: int) -> range:
        """The places of a batch, by its number from 0."""
        start = number * self.batch_size
        return range(start, min(start + self.batch_size, self.samples))


@dataclass(frozen=True, slots=True)
class ListedCut:
    """Batches of any size.

    Attributes:
        stops: the place behind the last one of each batch, ascending; no batch is empty.
    """

    stops: Sequence[int]

    @property
    def samples(self) -> int:
        """The number of samples in the epoch."""
        return self.stops[-1] if self.stops else 0

    @property
    def used(self) -> int:
        """The number of samples that its batches use: all."""
        return self.samples

    @property
    def steps(self) -> int:
        """The number of batches."""
        return len(self.stops)

    def stop(self, start: int) -> int | None:
        """Where the batch ends that starts at a place; None if no batch does."""
        number = bisect_right(self.stops, start)
        return self.stops[number] if number < len(self.stops) else None

    def batch(self, number: int) -> range:
        """The places of a batch, by its number from 0."""
        return range(self.stops[number - 1] if number else 0, self.stops[number])
