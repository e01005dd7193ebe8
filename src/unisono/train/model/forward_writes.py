"""Weights that a forward or backward pass changes: each worker would do so once for each of its shards."""

from collections.abc import Mapping
from operator import attrgetter

from torch import Tensor

from unisono.checkpoint.quick_digest import Summing, flipped_bits
from unisono.errors import ModelError
from unisono.train.model.at_rest import MOST_FLIPPED
from unisono.words import Sums

FIRST, EVERY = 8, 64
"""The first calls, and every so many after them, are compared bit for bit."""


_VERSION = attrgetter("_version")


class ForwardWrites:
    """Compares the weights before the shards of a call with the weights after them.

    A replaced tensor, or a write that torch has counted, is seen in each call, and has the next ones compared as well.
    A write into ``parameter.data`` is seen only where bits are compared.

    Args:
        weights: the weights by name, also frozen ones.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._names, self._weights = list(weights), list(weights.values())
        self._counted = [each for each in self._weights if not each.is_inference()]
        self._summing = Summing()
        self._calls = 0
        self._was_written = False
        self._before: Sums | None = None
        self._marks: list[int] = []

    def begin(self) -> None:
        """The shards of a call are about to be computed."""
        is_compared = self._was_written or self._calls < FIRST or self._calls % EVERY == 0
        self._calls += 1
        self._before = self._summing.thirds(self._weights) if is_compared else None
        self._marks = self._marked()

    def require_none(self) -> None:
        """The shards are computed.

        Raises:
            ModelError: they have changed weights; names one of them. A flipped bit is none of this.
        """
        is_written = self._marked() != self._marks
        self._was_written |= is_written
        if self._before is None:
            return
        after = self._summing.thirds(self._weights)
        pairs = zip(self._names, self._before, after, strict=True)
        changed = [name for name, old, new in pairs if (old != new).any()]
        if changed and (is_written or flipped_bits(self._before, after) > MOST_FLIPPED):
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ModelError(
                f"the forward or backward pass changed {changed[0]}{others}. Each worker does so once for each of its "
                f"shards, so the weights would depend on the number of workers. Change weights in the loop's body, "
                f"after step.run; instead of max_norm of an embedding, renormalise its weight there"
            )

    def _marked(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._weights), *map(_VERSION, self._counted)]
