"""The position of a job in the data, and the batch of each step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unisono.plan.split import even_bounds


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
    """The global batches of a loop over ``samples`` samples.

    Batches never cross the end of an epoch. The last one is smaller where the batch size does not divide
    the number of samples, unless ``drop_last``.
    """

    samples: int
    batch_size: int
    shards: int
    drop_last: bool = False

    @property
    def per_epoch(self) -> int:
        """Steps in one epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    @property
    def epoch_samples(self) -> int:
        """Samples that one epoch uses."""
        return self.samples - self.samples % self.batch_size if self.drop_last else self.samples

    def at(self, position: Position) -> Batch:
        """The batch that starts at ``position``, which must lie inside an epoch."""
        stop = min(position.offset + self.batch_size, self.samples)
        size = stop - position.offset
        assert size > 0, f"position {position} lies outside an epoch of {self.samples} samples"
        bounds = tuple(even_bounds(size, self.shards))
        least = self.batch_size if self.drop_last else 1  # samples that another batch would need
        return Batch(position.epoch, position.offset, stop, bounds, self.samples - stop < least)

    def after(self, position: Position, batch: Batch) -> Position:
        """Where the job stands once ``batch`` is committed."""
        done = replace(position, step=position.step + 1, samples=position.samples + batch.size)
        if batch.is_last_in_epoch:
            return replace(done, epoch=batch.epoch + 1, offset=0)
        return replace(done, offset=batch.stop)

    def next_from(self, position: Position, epochs: int) -> Position | None:
        """Where the next batch starts; None if there is none left.

        With ``drop_last`` an epoch is over as soon as what is left of it is no whole batch, which may have grown.
        """
        if self.drop_last and position.offset > 0 and self.samples - position.offset < self.batch_size:
            position = replace(position, epoch=position.epoch + 1, offset=0)
        return position if position.epoch < epochs and self.per_epoch else None

    def remaining(self, position: Position, epochs: int) -> Iterator[tuple[Position, Batch]]:
        """Each batch from ``position`` to the end of the last epoch, with the position it starts at."""
        start = self.next_from(position, epochs)
        while start is not None:
            batch = self.at(start)
            yield start, batch
            start = self.next_from(self.after(start, batch), epochs)
