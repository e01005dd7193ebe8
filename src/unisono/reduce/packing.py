"""Tensors as bytes in a row."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unisono.reduce.buckets import ALIGNMENT

NOTHING = torch.empty(0, dtype=torch.uint8)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors' elements, each tensor at a multiple of 64 bytes: uint8, 1-D, on the CPU, a copy."""
    packed = torch.zeros(sum(_padded(tensor) for tensor in tensors), dtype=torch.uint8)
    for view, tensor in zip(_views(packed, tensors), tensors, strict=True):
        view.copy_(tensor.detach())
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was packed, with the shapes, dtypes and devices of these tensors: views on the CPU, copies elsewhere.

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
