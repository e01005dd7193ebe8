"""State as JSON and tensors: no pickle, on disk or on the wire."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.errors import CheckpointError

MARK = "~"
"""A JSON object whose only key is this stands for something that JSON does not have: ``{"~": [kind, value]}``."""

SUPPORTED = "None, bool, int, float, str, bytes, list, tuple, dict, torch tensors, NumPy arrays and numbers"

_Identity = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Take a tree of state apart.

    Args:
        tree: dicts, lists and tuples of numbers, text, tensors and arrays, as in any ``state_dict()``.

    Returns:
        a JSON value, and the tensors it refers to by name. Tensors that are one and the same (tied weights)
        appear once.

    Raises:
        CheckpointError: something else is in it; names the place and the type.
    """
    writer = _Writer()
    return writer.encode(tree, ""), writer.tensors


def unflatten(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put a tree of state together again: the inverse of :func:`flatten`, types and order included."""
    if isinstance(skeleton, list):
        return [unflatten(part, tensors) for part in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if list(skeleton) != [MARK]:
        return {key: unflatten(part, tensors) for key, part in skeleton.items()}
    kind, value = skeleton[MARK]
    return _DECODERS[kind](value, tensors)


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[_Identity, str] = {}

    def encode(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, str, float):
            return value
        if isinstance(value, Tensor):
            return _marked("tensor", self._name(value, path))
        if isinstance(value, np.ndarray) and value.dtype != object:
            array = np.ascontiguousarray(value)
            data = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
            return _marked("array", [self._name(data, path), array.dtype.str, list(value.shape)])
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        if isinstance(value, list | tuple):
            parts = [self.encode(part, f"{path}[{number}]") for number, part in enumerate(value)]
            return parts if isinstance(value, list) else _marked("tuple", parts)
        return self._encode_leaf(value, path)

    def _encode_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if type(value) not in (dict, OrderedDict):
            raise _unsupported(value, path)
        if all(type(key) is str for key in value) and list(value) != [MARK]:
            return {key: self.encode(part, f"{path}.{key}" if path else key) for key, part in value.items()}
        pairs = [
            [self.encode(key, f"{path}: key"), self.encode(part, f"{path}[{key!r}]")] for key, part in value.items()
        ]
        return _marked("items", pairs)

    def _encode_leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, np.generic) and not isinstance(value, np.void):
            return _marked("number", [value.dtype.str, self.encode(value.item(), path)])
        if isinstance(value, bytes):
            return _marked("bytes", value.hex())
        if isinstance(value, torch.dtype):
            return _marked("dtype", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return _marked("device", str(value))
        if isinstance(value, bool | int | float | str):  # subclasses, such as an IntEnum: the value is what counts
            return _plain(value)
        raise _unsupported(value, path)

    def _name(self, tensor: Tensor, path: str) -> str:
        if tensor.is_sparse or tensor.is_quantized:
            raise _unsupported(tensor, path)
        identity = _identity(tensor)
        if identity not in self._names:
            name = path or "value"
            self._names[identity] = name
            self.tensors[name] = tensor.detach()
        return self._names[identity]


def _identity(tensor: Tensor) -> _Identity:
    # An empty tensor owns no memory that could tell it apart.
    address = tensor.data_ptr() if tensor.numel() else id(tensor)
    return address, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _marked(kind: str, value: Any) -> dict[str, Any]:
    return {MARK: [kind, value]}


def _plain(value: Any) -> Any:
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))


def _unsupported(value: Any, path: str) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return CheckpointError(f"{path or 'the state'} is a {kind}, which cannot be kept: state is made of {SUPPORTED}")


_DECODERS: dict[str, Any] = {
    "tensor": lambda name, tensors: tensors[name],
    "array": lambda value, tensors: tensors[value[0]].numpy().view(np.dtype(value[1])).reshape(value[2]).copy(),
    "tuple": lambda parts, tensors: tuple(unflatten(part, tensors) for part in parts),
    "items": lambda pairs, tensors: {unflatten(key, tensors): unflatten(part, tensors) for key, part in pairs},
    "number": lambda value, tensors: np.dtype(value[0]).type(unflatten(value[1], tensors)),
    "bytes": lambda value, tensors: bytes.fromhex(value),
    "dtype": lambda value, tensors: getattr(torch, value),
    "device": lambda value, tensors: torch.device(value),
}
