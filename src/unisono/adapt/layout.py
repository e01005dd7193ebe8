"""What the time of a step depends on, as far as a policy changes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How a step is computed.

    Attributes:
        workers: that take part.
        batch_size: samples in the global batch.
        shards: that it is cut into.
        cut: how many of these each of the job's shards has become; one worker has all of them.
    """

    workers: int
    batch_size: int
    shards: int
    cut: int = 1

    @property
    def job_shards(self) -> int:
        """The job's number of shards: the most workers that there can be."""
        return self.shards // self.cut

    @property
    def widest(self) -> int:
        """The most shards that a worker computes, one after the other."""
        return -(-self.job_shards // self.workers) * self.cut

    @property
    def shard_size(self) -> float:
        """Samples in a shard."""
        return self.batch_size / self.shards


def useful_sizes(shards: int, fewest: int, most: int) -> list[int]:
    """Numbers of workers that are worth something: with one worker less the slowest one would have more shards.

    With 8 shards those are 1, 2, 3, 4 and 8: 5, 6 and 7 workers wait for the one with two shards, as 4 do.

    Args:
        shards: of the job.
        fewest: workers; is among them in any case, if there are as many shards.
        most: workers.

    Returns:
        them, smallest first.
    """
    first = min(max(1, fewest), shards)
    return [
        workers
        for workers in range(first, min(most, shards) + 1)
        if workers == first or -(-shards // workers) < -(-shards // (workers - 1))
    ]
