"""A shuffle by blocks: blocks of neighbouring samples in a keyed order, and the samples of a few blocks mixed."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unisono.plan.order import Indices, Permutation, Stream, signed, stream_seed


@dataclass(frozen=True, slots=True)
class BlockShuffle:
    """A shuffle for data sets whose samples lie in blocks (of a compressed file, of a file far away).

    Each epoch goes through the blocks in a keyed order, and mixes the samples of some blocks at a time. So whoever
    keeps these blocks reads each of them once in an epoch.

    Args:
        size: the number of samples in a block: block b has those from ``b * size`` on.
        window: the number of blocks whose samples are mixed; more of them shuffle better, and take more memory.
    """

    size: int
    window: int = 16

    def __str__(self) -> str:
        return f"blocks of {self.size}, {self.window} at a time"


@dataclass(frozen=True, slots=True)
class BlockedOrder:
    """The order of one epoch: a permutation of ``0 … samples-1``, of which any entry can be had alone.

    Keeps eight bytes for each block.

    Attributes:
        seed: the job's seed.
        epoch: the number of the epoch.
        samples: the number of samples.
        how: the blocks.
    """

    seed: int
    epoch: int
    samples: int
    how: BlockShuffle

    def __call__(self, positions: Indices) -> Indices:
        """The entries at ``positions``, an int64 array of one dimension with values in ``0 … samples-1``."""
        blocks, short_at = _blocks_in_order(self.seed, self.epoch, self.samples, self.how.size)
        full, found = self.how.size * self.how.window, np.empty_like(positions)
        missing = -self.samples % self.how.size  # in the last block, and so in the window that has it
        short = short_at // self.how.window
        windows = positions // full
        behind = windows >= short
        windows[behind] = np.maximum((positions[behind] + missing) // full, short)
        for window in np.unique(windows).tolist():
            here, members = windows == window, blocks[window * self.how.window : (window + 1) * self.how.window]
            start = window * full - (missing if window > short else 0)
            if window == short:  # its short block is its last, so that all others are full
                members = np.concatenate([members[members != len(blocks) - 1], [len(blocks) - 1]])
            count = len(members) * self.how.size - (missing if window == short else 0)
            key = signed(stream_seed(self.seed, Stream.WINDOW, self.epoch, window))
            mixed = Permutation(count, key)(positions[here] - start)
            found[here] = members[mixed // self.how.size] * self.how.size + mixed % self.how.size
        return found


@lru_cache(maxsize=4)
def _blocks_in_order(seed: int, epoch: int, samples: int, size: int) -> tuple[Indices, int]:
    """The blocks as an epoch goes through them, and the place among them of the last block, which may be short."""
    count = -(-samples // size)
    key = signed(stream_seed(seed, Stream.BLOCKS, epoch))
    blocks = Permutation(count, key)(np.arange(count))
    return blocks, int(np.flatnonzero(blocks == count - 1)[0])
