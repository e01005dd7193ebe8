"""Buckets: several tensors fused into one flat buffer that is reduced together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the reduction starts soon after the backward pass."""

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many elements, in every bucket of every job."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in a bucket."""

    index: int  # in the list of tensors that the buckets were planned for
    offset: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """This tensor's elements in a bucket's flat buffer, in the shape and layout of the tensor."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The layout of one flat buffer."""

    slots: tuple[Slot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> Tensor:
        """A new flat buffer, 1-D of ``numel`` elements, not initialised beyond its padding."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors that live in ``flat``, in the order of the slots."""
        return [slot.view(flat) for slot in self.slots]


def plan_buckets(
    tensors: Sequence[Tensor], bucket_bytes: int, compressed: torch.dtype | None = None
) -> tuple[Bucket, ...]:
    """Group tensors of one dtype and device, from last to first, into buckets of about ``bucket_bytes``.

    The first bucket of a kind has 1 MiB at most, unless its first tensor alone has more.

    Args:
        tensors: what the buckets will hold.
        bucket_bytes: the size of a bucket, in bytes of the buffer.
        compressed: the dtype of the buffer for floating-point tensors of a wider one; by default each keeps its own.

    The plan follows from the tensors' list alone, never from the order in which gradients arrive, so every
    worker has the same one at any time. Backward passes visit parameters roughly from last to first.
    """
    kinds = list(dict.fromkeys((tensor.dtype, tensor.device) for tensor in reversed(tensors)))
    buckets: list[Bucket] = []
    for kind, device in kinds:
        dtype = _narrowed(kind, compressed)
        slots: list[Slot] = []
        offset, limit = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
        for index in reversed(range(len(tensors))):
            tensor = tensors[index]
            if (tensor.dtype, tensor.device) != (kind, device):
                continue
            if slots and (offset + tensor.numel()) * dtype.itemsize > limit:
                buckets.append(Bucket(tuple(slots), offset, dtype, device))
                slots, offset, limit = [], 0, bucket_bytes
            slots.append(Slot(index, offset, tuple(tensor.shape), _layout(tensor)))
            offset += max(1, -(-tensor.numel() // ALIGNMENT)) * ALIGNMENT
        buckets.append(Bucket(tuple(slots), offset, dtype, device))
    return tuple(buckets)


def _narrowed(dtype: torch.dtype, compressed: torch.dtype | None) -> torch.dtype:
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
