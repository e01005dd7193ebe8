"""Memory that the workers of one host share, without a name that a crash could leave behind."""

import mmap
import os
from collections.abc import Sequence

import psutil
import torch
from torch import Tensor

from unisono.errors import JobError
from unisono.reduce.peers import Peers

PAGE = 4096


class Segment:
    """Anonymous shared memory, mapped by all workers of this host.

    Args:
        descriptor: the memory's file descriptor; taken over and closed.
        size: the size in bytes.

    Attributes:
        bytes: the memory, 1-D uint8.
        copy: a private copy of it: what is written here, nobody else sees (the kernel copies on write).
    """

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            self._map = mmap.mmap(descriptor, size)
            self._copy = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.copy: Tensor = torch.frombuffer(self._copy, dtype=torch.uint8)

    def refresh(self) -> None:
        """Forget what was written to the copy: it is again as the memory is."""
        self._copy.madvise(mmap.MADV_DONTNEED)


def share_segments(peers: Peers, sizes: Sequence[int]) -> list[Segment]:
    """One segment per worker, mapped by all; collective.

    Args:
        peers: the workers of this host.
        sizes: bytes of each worker's segment, by rank; multiples of a page.

    Raises:
        JobError: there is too little memory for this worker's segment; says how much is needed and what to do.
    """
    own = _created(sizes[peers.rank])
    received = peers.exchange_descriptors(own) | {peers.rank: own}
    return [Segment(received[rank], sizes[rank]) for rank in range(len(sizes))]


def _created(size: int) -> int:
    available = psutil.virtual_memory().available
    if size > available:
        raise JobError(
            f"the workers of this host need {size / 2**20:.0f} MiB of shared memory each, and {available / 2**20:.0f} "
            f"MiB are free: start fewer workers on this host, or unisono.init(transport='process_group')"
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
