"""Tensors as rows of bytes, and values of which others are told by a digest once they know them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.layout import bytes_of, empty_as, form_of, require_values, sizes, torch_dtype
from unisono.errors import Unreadable

ALIGNMENT = 64
"""Bytes: each tensor of a row begins at a multiple of it."""

MOST_KNOWN = 64

Form = tuple[str, list[int]]
"""Dtype and shape of a tensor, as :func:`~unisono.checkpoint.layout.form_of` tells them."""


def size_of(forms: Sequence[Form]) -> int:
    """The bytes of a row of tensors.

    Raises:
        CheckpointError: no tensors have these forms.
    """
    return sum(_padded(bytes_of(sizes(shape), torch_dtype(name).itemsize)) for name, shape in forms)


def row_of(tensors: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    """Tensors behind each other as bytes: 1-D, uint8, of ``size`` elements."""
    row, start = torch.zeros(size, dtype=torch.uint8, device=device), 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        row[start : start + data.numel()] = data
        start += _padded(data.numel())
    return row


def tensors_in(row: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """The inverse of :func:`row_of`: views of the row.

    Raises:
        CheckpointError: no tensors have these forms, or a bool is none.
        Unreadable: the row is too short.
    """
    if size_of(forms) > row.numel():
        raise Unreadable(f"tensors of {size_of(forms)} bytes were announced, and {row.numel()} have come")
    found, start = [], 0
    for name, shape in forms:
        dtype = torch_dtype(name)
        length = math.prod(shape) * dtype.itemsize
        if not length:
            found.append(empty_as([name, shape], row.device))
            continue
        found.append(require_values(row[start : start + length].view(dtype).view(shape)))
        start += _padded(length)
    return found


def form(tensor: Tensor) -> Form:
    """The form of a tensor."""
    name, shape = form_of(tensor)
    return name, shape


def forms_of(tensors: Sequence[Tensor]) -> list[Form]:
    """The forms of tensors."""
    return [form(tensor) for tensor in tensors]


class Announcements:
    """JSON values that each of several members tells the others again and again, mostly the same.

    Args:
        gather: gives every member's JSON value, in the order of ranks. Collective.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather = gather
        self._known: dict[str, Any] = {}  # the same on all members

    def exchange(self, own: Any) -> list[Any]:
        """Every member's value, in the order of ranks. Collective. Only what is new to somebody travels whole."""
        keys = self._gather(_key(own))
        if any(key not in self._known for key in keys):
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            self._known |= {_key(value): value for value in self._gather(own)}
        if any(key not in self._known for key in keys):
            raise Unreadable("another worker has announced one thing, and said another: a fault of a host's memory")
        return [self._known[key] for key in keys]


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
