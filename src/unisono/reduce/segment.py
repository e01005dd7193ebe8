"""Memory that the workers of a host share, and private views of it."""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import psutil
import torch
from torch import Tensor

from unisono.errors import JobError
from unisono.reduce.buckets import ALIGNMENT, Bucket

PAGE = 4096

SWAPPED, IN_A_FILE = 62, 61
"""Bits of an entry of ``/proc/self/pagemap``."""

_MAP_FIXED, _MREMAP_MAYMOVE, _MREMAP_FIXED = 0x10, 1, 2
"""Linux' flags, on all processors, for a mapping in place of whatever is mapped there."""


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
    """Memory of this worker alone, at one address. It shows a segment until somebody writes here: then it differs.

    Args:
        size: the size in bytes, a multiple of a page.

    Attributes:
        bytes: the memory, 1-D uint8.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor from byte ``offset`` on, whose storage is its own: torch counts who else holds that."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def show(self, segment: Segment) -> None:
        """Show the beginning of a segment that is no smaller. What the memory held is forgotten.

        Raises:
            OSError: the system has no room for another mapping.
        """
        _mapped(self.bytes.data_ptr(), self.size, mmap.MAP_PRIVATE | _MAP_FIXED, segment.descriptor)

    def hold(self, fill: Callable[[Tensor], object]) -> None:
        """Show nothing any more, and hold other values. Whoever reads here meanwhile sees the old values or the new.

        Args:
            fill: a function that writes the values to memory of this size, 1-D uint8.

        Raises:
            OSError: as in :meth:`show`.
        """
        libc, address = _libc(), _mapped(None, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        fill(torch.frombuffer((ctypes.c_char * self.size).from_address(address), dtype=torch.uint8))
        moves = _MREMAP_MAYMOVE | _MREMAP_FIXED
        _require(libc.mremap(address, self.size, self.size, moves, self.bytes.data_ptr()), self.size)

    def refresh(self) -> None:
        """Forget what was written here: it is again as what it shows."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def is_written(self) -> bool:
        """Whether anything was written here, whatever it was.

        Raises:
            OSError: the system does not say.
        """
        with open("/proc/self/pagemap", "rb", buffering=0) as table:  # noqa: PTH123  a path would be asked for its kind first
            told = os.pread(table.fileno(), self.size // PAGE * 8, self.bytes.data_ptr() // PAGE * 8)
        entries = np.frombuffer(told, dtype=np.uint64)
        is_there = (entries >> np.uint64(SWAPPED)) != 0
        return bool((is_there & ((entries >> np.uint64(IN_A_FILE)) & np.uint64(1) == 0)).any())


def _mapped(address: int | None, size: int, flags: int, descriptor: int) -> int:
    both = mmap.PROT_READ | mmap.PROT_WRITE
    return _require(_libc().mmap(address, size, both, flags, descriptor, 0), size)


def _require(address: int | None, size: int) -> int:
    if address in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: no room for {size} bytes of memory that scripts see")
    assert address is not None, "an address"
    return address


_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = found.mremap.restype = ctypes.c_void_p
    integers = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *integers]
    found.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return found


@cache
def sees_writes() -> bool:
    """Whether this system says which pages of private memory were written. Some containers have none of its tables."""
    try:
        view = PrivateView(PAGE)
        view.show(Segment(created(PAGE), PAGE))
        int(view.bytes[0])
        before = view.is_written()
        view.bytes[0] = 1
        return not before and view.is_written()
    except (OSError, ValueError, JobError):
        return False


def created(size: int) -> int:
    """The file descriptor of new shared memory.

    Raises:
        JobError: there is too little memory for it; says how much is needed and what to do.
    """
    available = psutil.virtual_memory().available
    if size > available:
        raise JobError(
            f"the workers of this host need {size / 2**20:.0f} MiB of shared memory each, and {available / 2**20:.0f} "
            f"MiB are free: start fewer workers on this host, or unisono.init(transport='sockets')"
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
