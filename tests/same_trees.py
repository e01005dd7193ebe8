"""Whether two trees of state are the same: types, order, and every bit."""

import struct
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def difference(ours: Any, theirs: Any, path: str = "tree") -> str | None:
    """The first place where two trees differ, in words; None if they are the same."""
    if type(ours) is not type(theirs):
        return f"{path}: {type(ours).__name__} is not {type(theirs).__name__}"
    if isinstance(ours, dict):
        return _dict_difference(ours, theirs, path)
    if isinstance(ours, list | tuple | deque):
        if len(ours) != len(theirs) or getattr(ours, "maxlen", None) != getattr(theirs, "maxlen", None):
            return f"{path}: other lengths"
        return _first(difference(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(zip(ours, theirs, strict=True)))
    return None if _bits(ours) == _bits(theirs) else f"{path}: {ours!r} is not {theirs!r}"


def _dict_difference(ours: dict[Any, Any], theirs: dict[Any, Any], path: str) -> str | None:
    if isinstance(ours, OrderedDict):
        versions = difference(getattr(ours, "_metadata", None), getattr(theirs, "_metadata", None), f"{path} metadata")
        if versions:
            return versions
    keys = difference(list(ours), list(theirs), f"{path}: keys")
    return keys or _first(difference(ours[key], theirs[key], f"{path}[{key!r}]") for key in ours)


def _first(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each), None)


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        data = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, bytes(data.numpy())
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, complex):
        return struct.pack(">dd", value.real, value.imag)
    return value


def same(ours: Any, theirs: Any) -> bool:
    """Whether two trees are the same to the last bit; fails with the first difference."""
    found = difference(ours, theirs)
    assert found is None, found
    return True
