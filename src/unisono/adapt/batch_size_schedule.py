"""A batch that grows at epochs that are known beforehand."""

from collections.abc import Mapping

from unisono.adapt.policy import Policy
from unisono.adapt.view import View
from unisono.errors import JobError


class BatchSizeSchedule(Policy):
    """Multiplies the batch at the beginning of some epochs, and leaves the learning rate alone.

    In place of a decay of the learning rate: Smith et al., "Don't decay the learning rate, increase the batch size",
    arXiv 1711.00489.

    Args:
        factors: by what, at the beginning of which epoch; of the batch before it.

    Raises:
        JobError: an epoch below 1, or a factor that is not above 0.
    """

    def __init__(self, factors: Mapping[int, float] = {30: 5, 60: 5, 90: 5}) -> None:
        if any(epoch < 1 or not factor > 0 for epoch, factor in factors.items()):
            raise JobError(f"BatchSizeSchedule({dict(factors)}): epochs from 1 on, and factors above 0")
        self._factors = dict(factors)

    def after_epoch(self, view: View) -> None:
        """The next one may be one of those."""
        if (factor := self._factors.get(view.epoch + 1)) is not None:
            self.set_batch_size(round(view.batch_size * factor), epoch=view.epoch + 1, factor=factor)
