"""Memory that the workers of a host share, and private views of it."""

import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import pairwise

import psutil
import torch
from torch import Tensor

from unisono.errors import JobError
from unisono.reduce.buckets import ALIGNMENT, Bucket

PAGE = 4096


class Segment:
    """Anonymous shared memory, mapped by all workers of this host.

    Args:
        descriptor: the memory's file descriptor; taken over, and closed with this object.
        size: the size in bytes.

    Attributes:
        descriptor: the file descriptor.
        bytes: the memory, 1-D uint8.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map = mmap.mmap(descriptor, size)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)


class PrivateView:
    """Memory of this worker alone that shows the beginning of a segment, until somebody writes here: then it differs.

    Args:
        segment: the segment.
        size: the size in bytes, a multiple of a page.

    Attributes:
        bytes: the memory, 1-D uint8.
    """

    def __init__(self, segment: Segment, size: int) -> None:
        self._map = mmap.mmap(segment.descriptor, size, flags=mmap.MAP_PRIVATE)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def refresh(self) -> None:
        """Forget what was written here: it is again as what it shows."""
        self._map.madvise(mmap.MADV_DONTNEED)


def created(size: int) -> int:
    """The file descriptor of new shared memory.

    Raises:
        JobError: there is too little memory for it; says how much is needed and what to do.
    """
    available = psutil.virtual_memory().available
    if size > available:
        raise JobError(
            f"the workers of this host need {size / 2**20:.0f} MiB of shared memory each, and {available / 2**20:.0f} "
            f"MiB are free: start fewer workers on this host, or unisono.init(communication={{'transport': 'sockets'}})"
        )
    # Not /dev/shm: this memory has no name, needs no space set aside, and is gone with its last user.
    descriptor = os.memfd_create("unisono", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def elements(memory: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A 1-D view of ``numel`` elements from byte ``offset`` of a segment's memory on."""
    return memory[offset : offset + numel * dtype.itemsize].view(dtype)


def pages(size: int) -> int:
    """``size`` bytes, rounded up to whole pages, one at least."""
    return max(1, -(-size // PAGE)) * PAGE


def padded(bucket: Bucket) -> int:
    """The bytes of a bucket's flat buffer in a segment."""
    size = bucket.numel * bucket.dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def starts_of(buckets: Sequence[Bucket], offset: int = 0) -> list[int]:
    """The byte at which each bucket's flat buffer starts, and the one behind the last."""
    starts = [offset]
    for bucket in buckets:
        starts.append(starts[-1] + padded(bucket))
    return starts


def flats_in(memory: Tensor, buckets: Sequence[Bucket], offset: int = 0) -> tuple[Tensor, ...]:
    """Flat buffers one behind the other, from byte ``offset`` of a segment's memory on."""
    return tuple(
        elements(memory, start, bucket.numel, bucket.dtype)
        for bucket, (start, _) in zip(buckets, pairwise(starts_of(buckets, offset)), strict=True)
    )
