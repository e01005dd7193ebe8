"""State as JSON and tensors: no pickle, on disk or on the wire."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unisono.checkpoint.decoder import DEEPEST, FORMS, KINDS, MARK, Decoder, is_plain
from unisono.checkpoint.layout import is_kept
from unisono.errors import CheckpointError

SUPPORTED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, deque, dict, OrderedDict, Counter, dense torch "
    "tensors, dtypes and devices, NumPy arrays and numbers"
)


def flatten(tree: Any, *, hollow: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Take a tree of state apart.

    Args:
        tree: dicts, lists and tuples of numbers, text, tensors and arrays, as in any ``state_dict()``.
        hollow: whether tensors may be on the meta device, in place of those that another process has.

    Returns:
        a JSON value without NaN and infinities, and the tensors it refers to by name: the tree's own, not copies,
        detached. Tensors that are one and the same (tied weights) appear once.

    Raises:
        CheckpointError: something else is in it; names the place and the type.
    """
    writer = _Writer(hollow)
    return writer.encode(tree, _Place()), writer.tensors


def unflatten(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put a tree of state together again: the inverse of :func:`flatten`, types, order and memory layout included.

    A parameter comes back as a plain tensor. All tensors are where ``tensors`` are. Whoever wrote the two, nothing
    comes of them but what :func:`flatten` takes, and no more memory is taken than they have, several times over.

    Raises:
        CheckpointError: they are not what :func:`flatten` makes; says what is wrong.
    """
    return Decoder(tensors).tree(skeleton)


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a tree: in words, and how deep it is."""

    path: str = ""
    depth: int = 0

    def key(self, key: str) -> _Place:
        return _Place(f"{self.path}.{key}" if self.path else key, self.depth + 1)

    def item(self, item: Any) -> _Place:
        return _Place(f"{self.path}[{item!r}]", self.depth + 1)


class _Writer:
    def __init__(self, hollow: bool) -> None:
        self._hollow = hollow
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, place: _Place) -> Any:
        if is_plain(value):
            return value
        kind = type(value)
        if place.depth > DEEPEST:
            raise CheckpointError(f"{place.path} is more than {DEEPEST} levels deep, or the state holds itself")
        if kind is list:
            return [self.encode(part, place.item(number)) for number, part in enumerate(value)]
        if kind in (dict, OrderedDict):
            return self._encode_dict(value, place)
        if kind in KINDS:
            name = KINDS[kind]
            return _marked(name, self.encode(FORMS[name].simpler(value), place))
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self._encode_numbers(value, place)
        raise _unsupported(_type(value), place)

    def _encode_dict(self, value: dict[Any, Any], place: _Place) -> Any:
        if type(value) is OrderedDict:
            # Module.state_dict notes the versions of its parts here, and load_state_dict goes by them.
            versions = getattr(value, "_metadata", None)
            return _marked(
                "ordered", self._encode_dict(dict(value), place), self.encode(versions, place.key("_metadata"))
            )
        if all(type(key) is str for key in value) and list(value) != [MARK]:
            return {key: self.encode(part, place.key(key)) for key, part in value.items()}
        return _marked(
            "items", [[self._encode_key(key, place), self.encode(value[key], place.item(key))] for key in value]
        )

    def _encode_key(self, key: Any, place: _Place) -> Any:
        if isinstance(key, Tensor):
            raise _unsupported("dict with a tensor as a key", place)
        return self.encode(key, _Place(f"a key of {place.path or 'the state'}", place.depth + 1))

    def _encode_numbers(self, value: Tensor | np.ndarray[Any, Any] | np.generic, place: _Place) -> Any:
        if isinstance(value, Tensor):
            _require_dense(value, place, self._hollow)
            if value.dtype == torch.complex128:  # which safetensors does not have
                return _marked("pairs", self._encode_tensor(torch.view_as_real(value.detach().resolve_conj()), place))
            return self._encode_tensor(value, place)
        if not is_kept(value.dtype) or (isinstance(value, np.ndarray) and type(value) is not np.ndarray):
            raise _unsupported(f"{_type(value)} of {value.dtype}", place)
        if isinstance(value, np.generic):
            return _marked("number", value.dtype.str, value.tobytes().hex())
        names = [self._name(_bytes_of(value), place)] if value.nbytes else []
        return _marked("array", value.dtype.str, list(value.shape), *names)

    def _encode_tensor(self, tensor: Tensor, place: _Place) -> Any:
        name = self._name(tensor, place)
        return _marked("tensor", name, *_layout(self.tensors[name]))

    def _name(self, tensor: Tensor, place: _Place) -> str:
        """The name of a tensor among those that are kept; the same tensor has one."""
        _require_dense(tensor, place, self._hollow)
        identity = _identity(tensor)
        if identity not in self._names:
            self._names[identity] = name = self._new_name(place)
            self.tensors[name] = tensor if tensor.is_meta else tensor.detach().resolve_conj().resolve_neg()
        return self._names[identity]

    def _new_name(self, place: _Place) -> str:
        # Two places may have one path, as {"a": {"b": 1}, "a.b": 2} has; "__metadata__" is taken by safetensors.
        path = place.path.encode(errors="replace").decode() or "value"
        name, number = path, 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{path}#{number}"
        return name


def _marked(kind: str, *parts: Any) -> dict[str, Any]:
    return {MARK: [kind, *parts]}


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_meta:
        return (id(tensor),)
    if not tensor.numel():
        return (object(),)  # owns no memory that could be shared
    form = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), *form


def _bytes_of(array: np.ndarray[Any, Any]) -> Tensor:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())


def _layout(tensor: Tensor) -> list[list[int]]:
    """The strides that a copy of a tensor has, unless it lies row by row.

    Fused optimizers go through parameters and state by address, so state needs to lie as its parameters do.
    """
    strides = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    return [] if strides == _row_by_row(tensor.shape) else [list(strides)]


def _row_by_row(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _require_dense(tensor: Tensor, place: _Place, hollow: bool) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise _unsupported(_type(tensor), place)
    for trait, found in {
        str(tensor.layout): tensor.layout is not torch.strided,
        "nested": tensor.is_nested,
        "quantized": tensor.is_quantized,
        "meta": tensor.is_meta and not hollow,
    }.items():
        if found:
            raise _unsupported(f"{trait} tensor", place)


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _unsupported(what: str, place: _Place) -> CheckpointError:
    return CheckpointError(
        f"{place.path or 'the state'} is a {what}, which cannot be kept: state is made of {SUPPORTED}"
    )
