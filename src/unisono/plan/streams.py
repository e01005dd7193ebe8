"""Seeds of random streams, derived from what the stream is for and never from who computes it."""

import hashlib
import struct
from enum import IntEnum


class Stream(IntEnum):
    """What a random stream is for. The numbers are part of the promise: never change one."""

    SCRIPT = 1  # what the user's script draws between the steps: (step,)
    SHARD = 2  # dropout and the like in one shard of one step: (step, call, shard)
    SAMPLE = 3  # random augmentation of one sample: (epoch, sample)
    ORDER = 4  # the order of samples in one epoch: (epoch,)
    EVALUATION = 5  # a model that draws at evaluation: (step, block)
    AUDIT = 6  # which shards are computed again: (step, call, shard)
    AFTER = 7  # what the user's script draws behind a loop: (loop,)


def stream_seed(seed: int, stream: Stream, *key: int) -> int:
    """The 64-bit seed of one random stream.

    Args:
        seed: the job's seed, of any sign and below 2**63 in size.
        stream: what the numbers are for.
        key: where in the job, as listed beside each :class:`Stream`.
    """
    words = struct.pack(f"<{len(key) + 2}q", seed, stream, *key)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"unisono").digest(), "little")
