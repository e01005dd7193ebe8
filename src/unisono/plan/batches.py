"""The position of a job in the data, how epochs are cut into batches, and the batch of each step."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from unisono.plan.split import even_bounds


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
    """Batches of one size."""

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


# Where a job stands, and the batch of each step.


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of a job in one loop over a data set.

    Attributes:
        step: steps committed so far, in the whole job.
        samples: samples consumed so far, in the whole job.
        epoch: the pass over this loop's data set that comes next or is under way.
        offset: samples of this pass that are consumed.
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One global batch: positions ``start … stop-1`` of the shuffled epoch, cut into shards."""

    epoch: int
    start: int
    stop: int
    bounds: tuple[int, ...]  # of the shards, relative to start
    is_last_in_epoch: bool

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.stop - self.start

    @property
    def shards(self) -> int:
        """The number of shards, of which some may be empty."""
        return len(self.bounds) - 1

    def shard(self, number: int) -> range:
        """The positions in the shuffled epoch that belong to a shard; may be empty."""
        return range(self.start + self.bounds[number], self.start + self.bounds[number + 1])

    def part(self, shards: range) -> "Batch":
        """What some neighbouring shards make up by themselves."""
        first = self.bounds[shards.start]
        bounds = tuple(bound - first for bound in self.bounds[shards.start : shards.stop + 1])
        return replace(self, start=self.start + first, stop=self.start + first + bounds[-1], bounds=bounds)


@dataclass(frozen=True, slots=True)
class Batches:
    """The global batches of a loop. They never cross the end of an epoch.

    Attributes:
        cut: a function of an epoch and a batch size; returns how that epoch is cut into batches.
        batch_size: the number of samples in a batch, where nothing else decides it.
        filled: the number of shards among which samples are distributed, a divisor of ``shards``; the others, which lie
            evenly between them, are empty. None for all.
    """

    cut: Callable[[int, int], EpochCut]
    batch_size: int
    shards: int
    filled: int | None = None

    @classmethod
    def even(cls, samples: int, batch_size: int, shards: int, drop_last: bool = False) -> "Batches":
        """Batches of one size, the same in every epoch of so many samples.

        The last one is smaller where the batch size does not divide the number of samples, unless ``drop_last``.
        """
        return cls(partial(_even, samples, drop_last), batch_size, shards)

    def of(self, epoch: int) -> EpochCut:
        """How an epoch is cut into batches."""
        return self.cut(epoch, self.batch_size)

    def at(self, position: Position) -> Batch:
        """The batch that starts at ``position``, where one has to start."""
        cut, start = self.of(position.epoch), position.offset
        stop = cut.stop(start)
        assert stop is not None, f"no batch starts at {position}"
        filled = self.filled or self.shards
        parts, distance = even_bounds(stop - start, filled), self.shards // filled
        bounds = tuple(parts[-(-shard // distance)] for shard in range(self.shards + 1))
        return Batch(position.epoch, start, stop, bounds, cut.stop(stop) is None)

    def after(self, position: Position, batch: Batch) -> Position:
        """Where the job stands once ``batch`` is committed."""
        step, samples = position.step + 1, position.samples + batch.size
        if batch.is_last_in_epoch:
            return Position(step, samples, batch.epoch + 1)
        return Position(step, samples, position.epoch, batch.stop)

    def next_from(self, position: Position, epochs: int) -> Position | None:
        """Where the next batch starts; None if there is none left.

        An epoch is over as soon as no batch starts where the job stands: with ``drop_last`` what is left of it may be
        no whole batch, which may have grown.
        """
        while position.epoch < epochs:
            if self.of(position.epoch).stop(position.offset) is not None:
                return position
            position = replace(position, epoch=position.epoch + 1, offset=0)
        return None

    def remaining(self, position: Position, epochs: int) -> Iterator[tuple[Position, Batch]]:
        """Each batch from ``position`` to the end of the last epoch, with the position it starts at."""
        start = self.next_from(position, epochs)
        while start is not None:
            batch = self.at(start)
            yield start, batch
            start = self.next_from(self.after(start, batch), epochs)


def _even(samples: int, drop_last: bool, epoch: int, batch_size: int) -> EpochCut:
    return EvenCut(samples, batch_size, drop_last)
