"""The closed lists of what bytes may become: the dtypes, shapes and strides of tensors and arrays."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.received import memory, short

KEPT = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes of tensors, and what they are called in a safetensors file."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""All dtypes by their names in torch."""

_ON_THE_WIRE = {*KEPT, torch.complex32, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}

_NUMPY = re.compile(
    r"\|b1|\|[iu]1|[<>](?:[iu][248]|f(?:2|4|8|16)|c(?:8|16|32))"
    r"|[<>][mM]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|\|S[1-9][0-9]{0,8}|[<>]U[1-9][0-9]{0,8}"
)
"""Numbers, times, bytes and text: what has no pointer in it, whoever wrote it."""

_MOST_DIMENSIONS = 64
_LARGEST_SIZE = 2**63 - 1
_LAST_CHARACTER = 0x10FFFF


def is_kept(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this dtype can be kept: their bytes and ``dtype.str`` say everything."""
    return dtype.names is None and _NUMPY.fullmatch(dtype.str) is not None


def numpy_dtype(name: Any) -> np.dtype[Any]:
    """A dtype by its ``dtype.str``.

    Raises:
        CheckpointError: it is none of those that are kept.
    """
    if not isinstance(name, str) or _NUMPY.fullmatch(name) is None:
        raise CheckpointError(f"{short(name)} is no dtype of an array that can be kept")
    try:
        return np.dtype(name)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is no dtype of an array on this machine") from error


def torch_dtype(name: Any) -> torch.dtype:
    """A dtype of tensors whose bytes travel, by its name in torch.

    Raises:
        CheckpointError: it is none of these.
    """
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found not in _ON_THE_WIRE:
        raise CheckpointError(f"{short(name)} is no dtype of a tensor")
    return found


def sizes(found: Any) -> list[int]:
    """A shape, or strides.

    Raises:
        CheckpointError: it is no list of numbers from 0.
    """
    if not isinstance(found, list) or len(found) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{short(found)} is no list of at most {_MOST_DIMENSIONS} sizes")
    for size in found:
        if type(size) is not int or not 0 <= size <= _LARGEST_SIZE:
            raise CheckpointError(f"{short(size)} is no size")
    return found


def bytes_of(shape: Sequence[int], itemsize: int) -> int:
    """How many bytes the elements have.

    Raises:
        CheckpointError: more than this host has memory.
    """
    needed = math.prod(shape) * itemsize
    # An empty one needs none, but torch and NumPy compute with its other sizes, in 64 bits.
    if needed > memory() or math.prod(size for size in shape if size) * itemsize > _LARGEST_SIZE:
        raise CheckpointError(f"a shape of {short(list(shape))} needs more memory than this host has")
    return needed


def form_of(tensor: Tensor) -> list[Any]:
    """The dtype and the shape of a tensor, as JSON values."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def empty_as(form: Any, device: torch.device | str = "cpu") -> Tensor:
    """Room for a tensor whose :func:`form_of` was told.

    Raises:
        CheckpointError: no tensor has this form, or this host has no room for it.
    """
    match form:
        case [name, shape]:
            dtype = torch_dtype(name)
            bytes_of(sizes(shape), dtype.itemsize)
            try:
                return torch.empty(shape, dtype=dtype, device=device)
            except RuntimeError as error:
                raise CheckpointError(f"there is no room for {dtype} of the shape {short(shape)}: {error}") from error
    raise CheckpointError(f"{short(form)} is no dtype with a shape")


def require_dense(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Refuse strides with which elements would overlap, or lie apart.

    Raises:
        CheckpointError: these are such.
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != expected and 0 not in shape:
            raise CheckpointError(f"strides of {list(strides)} do not belong to a shape of {list(shape)}")
        expected *= size


def require_values(tensor: Tensor) -> Tensor:
    """Refuse a tensor of bool in which a byte is neither 0 nor 1: what torch computes with it would be undefined.

    Raises:
        CheckpointError: there is such a byte.
    """
    if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise CheckpointError("a tensor of bool holds values that are neither true nor false")
    return tensor


def array_of(data: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Bytes as an array: a view.

    Args:
        data: uint8, 1-D, of as many bytes as the array has.
        dtype: the array's dtype, one of those that checkpoints keep.
        shape: the array's shape.

    Raises:
        CheckpointError: not every element is a value of the dtype.
    """
    if dtype.kind == "b" and data.size and data.max() > 1:
        raise CheckpointError("an array of bool holds values that are neither true nor false")
    if dtype.kind == "U" and data.size and data.view(f"{dtype.str[0]}u4").max() > _LAST_CHARACTER:
        raise CheckpointError("an array of text holds numbers that stand for no character")
    return data.view(dtype).reshape(shape)
