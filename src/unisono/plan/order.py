"""The order of samples: keyed permutations with random access, of all of them or by blocks; and seeds."""

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

# Seeds of random streams, derived from what the stream is for and never from who computes it.


class Stream(IntEnum):
    """The purpose of a random stream. The numbers are part of the promise: never change one."""

    SCRIPT = 1  # what the user's script draws between the steps: (step,)
    SHARD = 2  # dropout and the like in one shard of one step: (step, call, shard)
    SAMPLE = 3  # random augmentation of one sample: (epoch, sample)
    ORDER = 4  # the order of samples in one epoch: (epoch,)
    EVALUATION = 5  # a model that draws at evaluation: (step, block), or (step, reader, turn) of a stream
    AUDIT = 6  # which shards are computed again: (step, call, shard)
    AFTER = 7  # what the user's script draws behind a loop: (loop,)
    SAMPLER = 8  # the order that a loader's sampler gives: (loop, epoch), and the seed of a generator of its own
    PLACE = 9  # random augmentation of what stands at one place of such an order: (loop, epoch, place)
    READER = 11  # one sample of a stream: (loop, epoch, sample), or (loop, epoch, sample, reader)
    COLLATE = 12  # the collation of one shard of a stream: (loop, epoch, reader, samples before)
    BLOCKS = 13  # the order of blocks in one epoch: (epoch,)
    WINDOW = 14  # the order of samples in some of these blocks: (epoch, window)
    BATCH = 15  # a batch that a data set makes: (training, epoch, batch), or what it does between: (training, time)
    CURVATURE = 17  # vectors by which curvature is measured: (step, vector)
    QUIET = 10  # what samples find that draw nothing: (epoch,), or (loop, epoch)


def stream_seed(seed: int, stream: Stream, *key: int) -> int:
    """The 64-bit seed of one random stream.

    ``seed`` has any sign and is below 2**63 in size; ``key`` is the place in the job, as listed beside each
    :class:`Stream`.
    """
    words = struct.pack(f"<{len(key) + 2}q", seed, stream, *key)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"unisono").digest(), "little")


Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Permutation:
    """A pseudo-random permutation of ``0 … size-1``: a Feistel network with cycle walking.

    A Feistel network permutes 2**bits numbers whatever its round function; values that fall outside of
    ``size`` are sent through again until they fall inside (Black and Rogaway, "Ciphers with arbitrary
    finite domains", CT-RSA 2002). Any entry costs the same few operations, so a data set of 10**9 samples
    costs no memory, and a job can start at any position.
    """

    size: int
    key: int

    def __call__(self, positions: Indices) -> Indices:
        """The entries at ``positions``, an int64 array of any shape with values in ``0 … size-1``."""
        if self.size <= 1:
            return np.zeros_like(positions)
        words = self._mix(positions.astype(np.uint64))
        outside = words >= self.size
        while outside.any():
            words[outside] = self._mix(words[outside])
            outside = words >= self.size
        return words.astype(np.int64)

    def _mix(self, words: _Words) -> _Words:
        bits = max(2, (self.size - 1).bit_length())
        low, high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        left, right, widths = words >> low, words & _mask(low), (high, low)
        for key in _round_keys(self.key):
            left, right = right, left ^ (_hash(right, key) & _mask(widths[0]))
            widths = widths[::-1]
        return (left << low) | right  # an even number of rounds: the halves are back in their places


@lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(stream_seed(key, Stream.ORDER, number) for number in range(_ROUNDS))


def sample_order(seed: int, epoch: int, size: int) -> Permutation:
    """The order in which epoch ``epoch`` of the job with this seed visits ``size`` samples."""
    return Permutation(size, signed(stream_seed(seed, Stream.ORDER, epoch)))


def _mask(bits: Any) -> np.uint64:
    return np.uint64((1 << int(bits)) - 1)


def signed(word: int) -> int:
    """A 64-bit word as a number that may be below 0."""
    return word - (1 << 64) if word >> 63 else word


def _hash(words: _Words, key: int) -> _Words:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) of ``words`` offset by ``key``."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(key)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


# A shuffle by blocks: blocks of neighbouring samples in a keyed order, and the samples of a few blocks mixed.


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
    """

    seed: int
    epoch: int
    samples: int
    how: BlockShuffle

    def __call__(self, positions: Indices) -> Indices:
        """The entries at ``positions``, an int64 array of one dimension with values in ``0 … samples-1``."""
        blocks, short_at = _blocks_in_order(self.seed, self.epoch, self.samples, self.how.size)
        full, entries = self.how.size * self.how.window, np.empty_like(positions)
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
            entries[here] = members[mixed // self.how.size] * self.how.size + mixed % self.how.size
        return entries


@lru_cache(maxsize=4)
def _blocks_in_order(seed: int, epoch: int, samples: int, size: int) -> tuple[Indices, int]:
    """The blocks as an epoch goes through them, and the place among them of the last block, which may be short."""
    count = -(-samples // size)
    key = signed(stream_seed(seed, Stream.BLOCKS, epoch))
    blocks = Permutation(count, key)(np.arange(count))
    return blocks, int(np.flatnonzero(blocks == count - 1)[0])
