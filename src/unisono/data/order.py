"""Which samples stand at which places of an epoch, and what each of them draws from."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from unisono.plan.block_order import BlockedOrder, BlockShuffle
from unisono.plan.epoch_cut import EpochCut, EvenCut
from unisono.plan.order import Indices, Stream, sample_order, stream_seed

BLOCK = 4096
"""Places of an epoch's order that are computed at once: a thousand cost hardly more than ten."""


class Order(Protocol):
    """The order in which a loop goes through its data set."""

    @property
    def digest(self) -> str:
        """What tells the order from those of other samplers; empty where settings say all of it."""

    def samples_at(self, epoch: int, places: range) -> Indices:
        """Which samples stand at these places of an epoch."""

    def counted_at(self, epoch: int, places: range) -> Indices:
        """The same as numbers of which each comes once in an epoch."""

    def stream(self, epoch: int, place: int, sample: int) -> int:
        """The seed of what a sample draws at a place."""

    def quiet_stream(self, epoch: int) -> int:
        """The seed of what all samples of an epoch find, as long as none of them draws."""

    def cut(self, epoch: int, batch_size: int) -> EpochCut:
        """How an epoch is cut into batches."""


@dataclass(frozen=True, slots=True)
class KeyedOrder:
    """Every sample once, as they are numbered or in a keyed permutation.

    What a sample draws is keyed by (seed, epoch, sample).

    Attributes:
        samples: the number of samples in the data set.
        seed: the job's seed.
        shuffle: whether the order is a permutation that follows from seed and epoch.
        drop_last: whether a last, smaller batch is left out.
    """

    samples: int
    seed: int
    shuffle: bool = False
    drop_last: bool = False

    @property
    def digest(self) -> str:
        """Nothing that the settings do not say."""
        return ""

    def samples_at(self, epoch: int, places: range) -> Indices:
        """Which samples stand at these places of an epoch."""
        if not self.shuffle or not places:
            return np.arange(places.start, places.stop)
        blocks = range(places.start // BLOCK, -(-places.stop // BLOCK))
        order = np.concatenate([_visited(self, epoch, block) for block in blocks])
        first = blocks.start * BLOCK
        return order[places.start - first : places.stop - first]

    def permutation(self, epoch: int) -> Callable[[Indices], Indices]:
        """What gives the samples at places of an epoch that is shuffled."""
        return sample_order(self.seed, epoch, self.samples)

    def counted_at(self, epoch: int, places: range) -> Indices:
        """The samples themselves."""
        return self.samples_at(epoch, places)

    def stream(self, epoch: int, place: int, sample: int) -> int:
        """The seed of what a sample draws, wherever it stands."""
        return stream_seed(self.seed, Stream.SAMPLE, epoch, sample)

    def quiet_stream(self, epoch: int) -> int:
        """The seed of what all samples of an epoch find, as long as none of them draws."""
        return stream_seed(self.seed, Stream.QUIET, epoch)

    def cut(self, epoch: int, batch_size: int) -> EpochCut:
        """Batches of one size, the last of which may be smaller."""
        return EvenCut(self.samples, batch_size, self.drop_last)


@dataclass(frozen=True, slots=True)
class BlockwiseOrder(KeyedOrder):
    """Every sample once, blocks of neighbours in a keyed order, and the samples of a few blocks mixed.

    Attributes:
        blocks: the blocks; there have to be some.
    """

    blocks: BlockShuffle | None = None

    @property
    def digest(self) -> str:
        """The blocks."""
        return str(self.blocks)

    def permutation(self, epoch: int) -> Callable[[Indices], Indices]:
        """What gives the samples at places of an epoch."""
        assert self.blocks is not None, "it is made with blocks"
        return BlockedOrder(self.seed, epoch, self.samples, self.blocks)


@lru_cache(maxsize=4)
def _visited(order: KeyedOrder, epoch: int, block: int) -> Indices:
    """The samples that the places of a block stand for."""
    return order.permutation(epoch)(np.arange(block * BLOCK, min((block + 1) * BLOCK, order.samples)))
