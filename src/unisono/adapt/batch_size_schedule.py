"""A batch that grows at epochs that are known beforehand."""

from collections.abc import Mapping

from unisono.adapt.policy import Policy
from unisono.adapt.shard_limit import ShardLimit
from unisono.adapt.view import View
from unisono.errors import JobError


class BatchSizeSchedule(Policy):
    """Multiplies the batch at the beginning of some epochs, and leaves the learning rate alone.

    In place of a decay of the learning rate: Smith et al., "Don't decay the learning rate, increase the batch size",
    arXiv 1711.00489.

    Args:
        factors: by what, at the beginning of which epoch; of the batch before it.
        largest_shard: samples in one shard at most: what a worker's memory allows. The number of shards grows and
            shrinks with the batch; by default it stays.

    Raises:
        JobError: an epoch or a size below 1, or a factor that is not above 0.
    """

    def __init__(self, factors: Mapping[int, float] = {30: 5, 60: 5, 90: 5}, largest_shard: int | None = None) -> None:
        if any(epoch < 1 or not factor > 0 for epoch, factor in factors.items()):
            raise JobError(f"BatchSizeSchedule({dict(factors)}): epochs from 1 on, and factors above 0")
        self._factors, self._limit = dict(factors), ShardLimit(largest_shard)

    def before_train(self, view: View) -> None:
        """The first batch may be too much at once for a worker."""
        if not self._limit.is_kept(view):
            shards = self._limit.shards(view.batch_size, view)
            self.set_batch_size(view.batch_size, shards, largest_shard=self._limit.samples)

    def after_epoch(self, view: View) -> None:
        """The next one may be one of those."""
        if (factor := self._factors.get(view.epoch + 1)) is not None:
            batch = round(view.batch_size * factor)
            self.set_batch_size(batch, self._limit.shards(batch, view), epoch=view.epoch + 1, factor=factor)
