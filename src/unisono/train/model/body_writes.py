"""What a loop's body changes behind an update: a worker that is behind changes it by itself."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from torch import Tensor

from unisono.checkpoint.quick_digest import Summing, flipped_bits
from unisono.train.model.at_rest import MOST_FLIPPED
from unisono.train.model.forward_writes import EVERY, FIRST
from unisono.words import Sums

_VERSION = attrgetter("_version")


class BodyWrites:
    """Compares what an update has left with what is there when the next call begins.

    Who is behind by an update, and is given what came of it, gets what the giver's body has changed as well, and then
    changes it once more. So if bodies change anything, updates are made again from their cause. Before that is known,
    in the first calls, they are anyway.

    What torch has counted is seen in each call; a write into ``tensor.data`` where bits are compared.

    Args:
        weights: the weights.
        buffers: a function that returns the buffers.
        kept: a function that returns the tensors that optimizers keep.
    """

    def __init__(
        self, weights: Sequence[Tensor], buffers: Callable[[], Sequence[Tensor]], kept: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._weights, self._buffers, self._kept, self._summing = weights, buffers, kept, Summing()
        self._has_written = self._is_new = False
        self._calls = 0
        self._left: list[int] | None = None
        self._sums: Sums | None = None

    @property
    def needs_cause(self) -> bool:
        """Whether a worker that is behind is to make the update of this call by itself."""
        return self._has_written or self._calls < FIRST

    def committed(self) -> None:
        """An update is made. Neither collective nor I/O."""
        is_compared = self._calls < FIRST or self._calls % EVERY == 0
        self._calls += 1
        self._is_new = False
        self._sums = self._summing.thirds(self._all()) if is_compared else None
        self._left = self._marked()

    def begin(self) -> None:
        """A call begins."""
        self._is_new = self.are_new
        self._has_written |= self._is_new
        self._left = self._sums = None  # what an attempt does that does not count is no write

    def goes_on(self) -> None:
        """A call is over that has changed nothing, and the body goes on: it may write yet."""
        self._sums = self._summing.thirds(self._all()) if self._calls < FIRST else None
        self._left = self._marked()

    @property
    def are_new(self) -> bool:
        """Whether anything was changed since the last update, before another call has begun."""
        if self._left is None or self._is_new:
            return self._is_new
        if self._left != self._marked():
            return True
        if self._sums is None:
            return False
        now = self._summing.thirds(self._all())
        return len(now) != len(self._sums) or flipped_bits(self._sums, now) > MOST_FLIPPED

    def _all(self) -> list[Tensor]:
        return [*self._weights, *self._buffers(), *self._kept()]

    def _marked(self) -> list[int]:
        tensors = [*self._weights, *self._buffers()] if self._sums is None else self._all()
        return [*map(Tensor.data_ptr, tensors), *(_VERSION(one) for one in tensors if not one.is_inference())]
