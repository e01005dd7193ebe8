"""Buckets: several tensors fused into one flat buffer that is reduced together; and tensors packed as bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the reduction starts soon after the backward pass."""

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many elements, in every bucket of every job."""


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A tensor in a bucket: its place and its shape."""

    index: int  # in the list of tensors that the buckets were planned for
    offset: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """This tensor's elements in a bucket's flat buffer, in the shape and layout of the tensor."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The layout of one flat buffer."""

    entries: tuple[BucketEntry, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> Tensor:
        """A new flat buffer, 1-D of ``numel`` elements, not initialised beyond its padding."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors that live in ``flat``, in the order of the entries."""
        return [entry.view(flat) for entry in self.entries]


def plan_buckets(
    tensors: Sequence[Tensor], bucket_bytes: int, compressed: torch.dtype | None = None
) -> tuple[Bucket, ...]:
    """Group tensors of one dtype and device, from last to first, into buckets of about ``bucket_bytes``.

    The first bucket of a kind has 1 MiB at most, unless its first tensor alone has more.

    The plan follows from the tensors' list alone, never from the order in which gradients arrive, so every worker has
    the same one at any time. Backward passes visit parameters roughly from last to first. Sizes are in bytes of the
    buffer, which has the dtype ``compressed`` for floating-point tensors of a wider one; by default each keeps its own.
    """
    kinds = list(dict.fromkeys((tensor.dtype, tensor.device) for tensor in reversed(tensors)))
    buckets: list[Bucket] = []
    for kind, device in kinds:
        dtype = narrowed(kind, compressed)
        entries: list[BucketEntry] = []
        offset, limit = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
        for index in reversed(range(len(tensors))):
            tensor = tensors[index]
            if (tensor.dtype, tensor.device) != (kind, device):
                continue
            if entries and (offset + tensor.numel()) * dtype.itemsize > limit:
                buckets.append(Bucket(tuple(entries), offset, dtype, device))
                entries, offset, limit = [], 0, bucket_bytes
            entries.append(BucketEntry(index, offset, tuple(tensor.shape), _layout(tensor)))
            offset += max(1, -(-tensor.numel() // ALIGNMENT)) * ALIGNMENT
        buckets.append(Bucket(tuple(entries), offset, dtype, device))
    return tuple(buckets)


def narrowed(dtype: torch.dtype, compressed: torch.dtype | None) -> torch.dtype:
    """The dtype of a bucket for tensors of one; see :func:`plan_buckets`."""
    narrows = compressed is not None and dtype.is_floating_point and dtype.itemsize > compressed.itemsize
    return compressed if compressed is not None and narrows else dtype


def _layout(tensor: Tensor) -> tuple[int, ...]:
    # A dense tensor keeps its memory format, so that optimizers stay on their fast path.
    dense = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != dense:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        dense *= size
    return tuple(tensor.stride())


# Tensors as bytes in a row.

NOTHING = torch.empty(0, dtype=torch.uint8)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors' elements, each tensor at a multiple of 64 bytes: uint8, 1-D, on the CPU, a copy."""
    packed = torch.zeros(sum(_padded(tensor) for tensor in tensors), dtype=torch.uint8)
    for view, tensor in zip(_views(packed, tensors), tensors, strict=True):
        view.copy_(tensor.detach())
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Unpack tensors with the shapes, dtypes and devices of ``like``: views on the CPU, copies elsewhere.

    Raises:
        ValueError: not as many bytes as these tensors have when they are packed.
    """
    if packed.numel() != (expected := sum(_padded(tensor) for tensor in like)):
        raise ValueError(f"{packed.numel()} bytes, where tensors of {expected} were expected")
    return [view.to(tensor.device) for view, tensor in zip(_views(packed, like), like, strict=True)]


def _views(packed: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    offset = 0
    for tensor in like:
        yield packed[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        offset += _padded(tensor)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
