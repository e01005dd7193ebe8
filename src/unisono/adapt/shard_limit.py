"""What a worker's memory allows."""

from dataclasses import dataclass

from unisono.adapt.batch_shape import shards_for
from unisono.adapt.view import View
from unisono.errors import JobError


@dataclass(frozen=True, slots=True)
class ShardLimit:
    """How large a shard may be. A worker computes its shards one after the other, so this bounds its activations.

    Attributes:
        samples: in one shard at most; None for no limit.

    Raises:
        JobError: the limit is below 1.
    """

    samples: int | None = None

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise JobError(f"largest_shard={self.samples}: a shard needs room for 1 sample at least")

    def shards(self, batch_size: int, view: View) -> int | None:
        """Into how many shards a batch is to be cut; None if it does not matter."""
        return None if self.samples is None else shards_for(batch_size, view.base_shards, self.samples)

    def is_kept(self, view: View) -> bool:
        """Whether the batch is cut as it should be."""
        return self.shards(view.batch_size, view) in (None, view.shards)
