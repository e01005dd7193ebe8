"""How large a global batch is, and how fine it is cut."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A global batch as numbers.

    Attributes:
        samples: in it.
        shards: that it is cut into; they differ by one sample at most.
    """

    samples: int
    shards: int

    @property
    def largest_shard(self) -> int:
        """Samples in the largest shard."""
        return -(-self.samples // self.shards)


def shards_for(batch_size: int, base_shards: int, largest_shard: int) -> int:
    """Into how many shards a batch is cut so that none is larger than a worker's memory allows.

    Args:
        batch_size: samples in the batch.
        base_shards: of the job.
        largest_shard: samples in one shard at most.

    Returns:
        the smallest power of two times ``base_shards`` that does it.

    Raises:
        ValueError: a number is below 1.
    """
    if min(batch_size, base_shards, largest_shard) < 1:
        given = f"batch_size={batch_size}, base_shards={base_shards}, largest_shard={largest_shard}"
        raise ValueError(f"shards_for({given}): all need to be above 0")
    shards = base_shards
    while BatchShape(batch_size, shards).largest_shard > largest_shard:
        shards *= 2
    return shards
