"""Tensors as rows of bytes, and values of which only a digest is sent once all members know them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.tensor_bytes import bytes_of, empty_as, form_of, require_values, sizes, torch_dtype
from unisono.errors import Unreadable

ALIGNMENT = 64
"""Each tensor of a row begins at a multiple of this number of bytes."""

MOST_VALUES = 64
"""The largest number of values that are remembered; with more, all are forgotten."""

Form = tuple[str, list[int]]
"""Dtype and shape of a tensor, as :func:`~unisono.checkpoint.tensor_bytes.form_of` returns them."""


def size_of(forms: Sequence[Form]) -> int:
    """The number of bytes of a row of tensors.

    Raises:
        CheckpointError: no tensors have these forms.
    """
    return sum(_padded(bytes_of(sizes(shape), torch_dtype(name).itemsize)) for name, shape in forms)


def row_of(tensors: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    """Tensors as bytes, one behind the other: a uint8 tensor of one dimension with ``size`` elements."""
    row, start = torch.zeros(size, dtype=torch.uint8, device=device), 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        row[start : start + data.numel()] = data
        start += _padded(data.numel())
    return row


def tensors_in(row: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """The tensors of a row that :func:`row_of` has made, as views of it.

    Raises:
        CheckpointError: no tensors have these forms, or a bool is neither 0 nor 1.
        Unreadable: the row is too short.
    """
    if size_of(forms) > row.numel():
        raise Unreadable(f"tensors of {size_of(forms)} bytes were announced, and {row.numel()} have come")
    tensors, start = [], 0
    for name, shape in forms:
        dtype = torch_dtype(name)
        length = math.prod(shape) * dtype.itemsize
        if not length:
            tensors.append(empty_as([name, shape], row.device))
            continue
        tensors.append(require_values(row[start : start + length].view(dtype).view(shape)))
        start += _padded(length)
    return tensors


def form(tensor: Tensor) -> Form:
    """The form of a tensor."""
    name, shape = form_of(tensor)
    return name, shape


def forms_of(tensors: Sequence[Tensor]) -> list[Form]:
    """The forms of tensors."""
    return [form(tensor) for tensor in tensors]


class Announcements:
    """Exchanges JSON values that members send again and again, mostly without a change.

    Args:
        gather: a function that returns every member's JSON value, in the order of ranks. Collective.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather = gather
        self._values: dict[str, Any] = {}  # the same on all members

    def exchange(self, own: Any) -> list[Any]:
        """Every member's value, in the order of ranks. Whole values are sent only if one of them is new. Collective."""
        keys = self._gather(_key(own))
        if any(key not in self._values for key in keys):
            if len(self._values) > MOST_VALUES:
                self._values.clear()
            self._values |= {_key(value): value for value in self._gather(own)}
        if any(key not in self._values for key in keys):
            raise Unreadable("a value from another worker does not match its digest: the memory of a host is faulty")
        return [self._values[key] for key in keys]


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
