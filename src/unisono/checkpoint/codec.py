"""State as JSON and tensors: no pickle, on disk or on the wire."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unisono.checkpoint.tensor_bytes import DTYPES, array_of, bytes_of, is_kept, numpy_dtype, require_dense, sizes
from unisono.errors import CheckpointError
from unisono.received import short
from unisono.word_sums import combined, sums_of_words
from unisono.words import MODULUS

SUPPORTED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, deque, dict, OrderedDict, Counter, dense torch "
    "tensors, dtypes and devices, NumPy arrays and numbers"
)


def flatten(tree: Any, *, hollow: bool = False, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Take a tree of state apart, into JSON and tensors.

    Args:
        tree: dicts, lists and tuples of numbers, text, tensors and arrays, as in any ``state_dict()``.
        hollow: whether tensors may be on the meta device, in place of those that another process has.
        name: the name of the tree, with which messages and names of tensors begin.

    Returns:
        a JSON value without NaN and infinities, and the tensors to which it refers by name: the tree's own, not copies,
        detached. A tensor that is in several places (tied weights) appears once.

    Raises:
        CheckpointError: the tree holds a value of another type; names the place and the type.
    """
    encoder = _Encoder(hollow)
    return encoder.encode(tree, _Place(name)), encoder.tensors


def can_keep(tree: Any) -> bool:
    """Whether :func:`flatten` accepts a tree of state."""
    try:
        flatten(tree)
    except CheckpointError:
        return False
    return True


def unflatten(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put a tree of state together again: the inverse of :func:`flatten`, types, order and memory layout included.

    A parameter comes back as a plain tensor. All tensors are on the devices of ``tensors``. Even if the arguments are
    hostile, the result holds only types that :func:`flatten` accepts, and takes a small multiple of their memory.

    Raises:
        CheckpointError: the arguments are no result of :func:`flatten`; says what is wrong.
    """
    return _Decoder(tensors).tree(skeleton)


class _Place(NamedTuple):
    """A place in a tree: its path, for messages, and its depth."""

    path: str = ""
    depth: int = 0

    def key(self, key: str) -> _Place:
        return _Place(f"{self.path}.{key}" if self.path else key, self.depth + 1)

    def item(self, item: Any) -> _Place:
        return _Place(f"{self.path}[{item!r}]", self.depth + 1)


class _Encoder:
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
        if kind in NAMES:
            name = NAMES[kind]
            return _marked(name, self.encode(FORMS[name].simpler(value), place))
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self._encode_numbers(value, place)
        raise _unsupported(_type(value), place)

    def _encode_dict(self, value: dict[Any, Any], place: _Place) -> Any:
        if type(value) is OrderedDict:
            # Module.state_dict keeps the versions of its modules here, which load_state_dict reads.
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
            if value.dtype == torch.complex128:  # safetensors does not have it
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
        return _marked("tensor", name, *_strides(self.tensors[name]))

    def _name(self, tensor: Tensor, place: _Place) -> str:
        """The name under which a tensor is kept; a tensor that is in several places has one name."""
        _require_dense(tensor, place, self._hollow)
        identity = _identity(tensor)
        if identity not in self._names:
            self._names[identity] = name = self._new_name(place)
            self.tensors[name] = tensor if tensor.is_meta else tensor.detach().resolve_conj().resolve_neg()
        return self._names[identity]

    def _new_name(self, place: _Place) -> str:
        # Two places may have one path, as in {"a": {"b": 1}, "a.b": 2}; safetensors reserves "__metadata__".
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
        return (object(),)  # it has no memory that another one could share
    layout = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), *layout


def _bytes_of(array: np.ndarray[Any, Any]) -> Tensor:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())


def _strides(tensor: Tensor) -> list[list[int]]:
    """A list with the strides of a dense copy of a tensor; an empty list if they are those of a contiguous tensor.

    Fused optimizers pair elements of parameters and state by address, so state needs the layout of its parameter.
    """
    strides = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    return [] if strides == _contiguous_strides(tensor.shape) else [list(strides)]


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _require_dense(tensor: Tensor, place: _Place, hollow: bool) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise _unsupported(_type(tensor), place)
    traits = {
        str(tensor.layout): tensor.layout is not torch.strided,
        "nested": tensor.is_nested,
        "quantized": tensor.is_quantized,
        "meta": tensor.is_meta and not hollow,
    }
    if unsupported := [trait for trait, has_it in traits.items() if has_it]:
        raise _unsupported(f"{unsupported[0]} tensor", place)


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _unsupported(kind: str, place: _Place) -> CheckpointError:
    return CheckpointError(
        f"{place.path or 'the state'} is a {kind}, which cannot be kept: state is made of {SUPPORTED}"
    )


def tree_digest(tree: Any) -> int:
    """The quick digest of a tree of state, of 64 bits, over the bits of its tensors and all other values.

    Raises:
        CheckpointError: it holds something that cannot be kept; names it.
    """
    return flat_digest(*flatten(tree))


def flat_digest(text: Any, tensors: Mapping[str, Tensor]) -> int:
    """The quick digest of a tree that :func:`flatten` has taken apart; it is never 0."""
    text_digest = blake2b(json.dumps(text).encode(), digest_size=8).digest()
    sums = sums_of_words([tensors[name] for name in sorted(tensors)])
    return (int.from_bytes(text_digest, "big") + combined(sums)) % MODULUS or 1


# How values that JSON does not have are written as JSON.

MARK = "~"
"""A JSON object whose only key is this stands for a value that JSON does not have: ``{"~": [kind, …]}``."""

DEEPEST = 100
"""The most levels of containers in a state: far more than any has, and few enough to be read back."""

_DEVICE = re.compile(r"[a-z]{1,16}(:[0-9]{1,4})?")


class Form(NamedTuple):
    """The way in which values of the type ``kind`` are written, as simpler values of the type ``written``."""

    kind: type
    written: type
    simpler: Callable[[Any], Any]
    build: Callable[[Any], Any]  # the inverse; may raise anything for a value that ``simpler`` never returns


def _deque(parts: dict[str, Any]) -> deque[Any]:
    if parts.keys() != {"parts", "maxlen"} or type(parts["parts"]) is not list:
        raise CheckpointError("a deque has parts, and maxlen")
    return deque(parts["parts"], parts["maxlen"])


def _complex(parts: list[Any]) -> complex:
    if [type(part) for part in parts] != [float, float]:
        raise CheckpointError("a complex number has two parts")
    return complex(*parts)


def _device(name: str) -> torch.device:
    if _DEVICE.fullmatch(name) is None:
        raise CheckpointError(f"{short(name)} is no device")
    return torch.device(name)


FORMS = {
    "tuple": Form(tuple, list, list, tuple),
    "shape": Form(torch.Size, list, list, lambda it: torch.Size(sizes(it))),
    "set": Form(set, list, list, set),
    "frozenset": Form(frozenset, list, list, frozenset),
    "deque": Form(deque, dict, lambda it: {"parts": list(it), "maxlen": it.maxlen}, _deque),
    "counter": Form(Counter, dict, dict, Counter),
    "bytes": Form(bytes, str, bytes.hex, bytes.fromhex),
    "float": Form(
        float, str, lambda it: struct.pack(">d", it).hex(), lambda it: struct.unpack(">d", bytes.fromhex(it))[0]
    ),
    "complex": Form(complex, list, lambda it: [it.real, it.imag], _complex),
    "dtype": Form(torch.dtype, str, lambda it: str(it).removeprefix("torch."), lambda it: DTYPES[it]),
    "device": Form(torch.device, str, str, _device),
}
NAMES = {form.kind: name for name, form in FORMS.items()}


def is_plain(value: Any) -> bool:
    """Whether JSON has this value, which is no container."""
    kind = type(value)
    return value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value))


# From a skeleton and tensors, which may be hostile, to a tree of state.

_LEVELS = 2 * DEEPEST + 8
"""The most levels of lists and objects in a skeleton that stands for a tree of at most ``DEEPEST`` levels."""


class _Decoder:
    """Puts one tree together, from a skeleton and tensors by name. Each tensor is converted once, to stay tied."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._decoded: dict[str, Tensor] = {}
        self._complexes: dict[int, Tensor] = {}
        self._bytes: dict[str, np.ndarray[Any, Any]] = {}

    def tree(self, skeleton: Any) -> Any:
        try:
            return self._decode(skeleton, 0)
        except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, struct.error) as error:
            raise CheckpointError(
                f"it holds values that Unisono never writes: {type(error).__name__}: {error}"[:400]
            ) from error

    def _decode(self, skeleton: Any, depth: int) -> Any:
        if is_plain(skeleton):
            return skeleton
        if depth > _LEVELS:
            raise CheckpointError(f"it is more than {DEEPEST} levels deep")
        if isinstance(skeleton, list):
            return [self._decode(part, depth + 1) for part in skeleton]
        if not isinstance(skeleton, dict):
            raise CheckpointError(f"{short(skeleton)} is no part of a state")
        if list(skeleton) != [MARK]:
            return {key: self._decode(part, depth + 1) for key, part in skeleton.items()}
        return self._marked(skeleton[MARK], depth + 1)

    def _marked(self, parts: Any, depth: int) -> Any:
        match parts:
            case [str(kind), simpler] if kind in FORMS:
                return self._build(kind, self._decode(simpler, depth))
            case ["pairs", pairs]:
                return self._complex(self._decode(pairs, depth))
            case ["tensor", str(name)]:
                return self._tensor(name, None)
            case ["tensor", str(name), strides]:
                return self._tensor(name, sizes(strides))
            case ["array", dtype, shape, *names] if len(names) <= 1:
                return self._array(dtype, sizes(shape), names)
            case ["number", dtype, str(data)]:
                return _number(dtype, bytes.fromhex(data))
            case ["ordered", items, versions]:
                return self._ordered(self._decode(items, depth), self._decode(versions, depth))
            case ["items", [*pairs]]:
                return dict(self._pair(pair, depth) for pair in pairs)
        raise CheckpointError(f"{short(parts)} stands for nothing that is kept")

    def _build(self, kind: str, simpler: Any) -> Any:
        form = FORMS[kind]
        if type(simpler) is not form.written:
            raise CheckpointError(f"a {kind} is not made of a {type(simpler).__name__}")
        return form.build(simpler)

    def _pair(self, pair: Any, depth: int) -> tuple[Any, Any]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CheckpointError(f"{short(pair)} is no pair of a key and a value")
        return self._decode(pair[0], depth), self._decode(pair[1], depth)

    def _ordered(self, items: Any, versions: Any) -> OrderedDict[Any, Any]:
        if type(items) is not dict:
            raise CheckpointError(f"an OrderedDict is not made of a {type(items).__name__}")
        built = OrderedDict(items)
        if versions is not None:
            setattr(built, "_metadata", versions)  # noqa: B010  the class does not declare it
        return built

    def _tensor(self, name: str, strides: list[int] | None) -> Tensor:
        if name not in self._decoded:
            stored = self._stored(name)
            if strides is not None and list(stored.stride()) != strides:
                require_dense(stored.shape, strides)
                empty = torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device=stored.device)
                stored = empty.copy_(stored)
            self._decoded[name] = stored
        return self._decoded[name]

    def _complex(self, pairs: Any) -> Tensor:
        """A view of pairs of float64 as complex128, which safetensors does not have."""
        if not isinstance(pairs, Tensor) or pairs.dtype != torch.float64 or pairs.shape[-1:] != (2,):
            raise CheckpointError("complex128 is not made of anything but pairs of float64")
        return self._complexes.setdefault(id(pairs), torch.view_as_complex(pairs))

    def _array(self, dtype_name: Any, shape: list[int], names: list[Any]) -> np.ndarray[Any, Any]:
        dtype = numpy_dtype(dtype_name)
        needed = bytes_of(shape, dtype.itemsize)
        data = self._data(names[0]) if names else np.empty(0, np.uint8)
        if data.size != needed:
            raise CheckpointError(f"an array of {needed} bytes is not made of {data.size}")
        return array_of(data, dtype, shape) if needed else np.empty(shape, dtype)

    def _data(self, name: Any) -> np.ndarray[Any, Any]:
        """A copy of a tensor's bytes, made once: else a hostile skeleton could copy one tensor any number of times."""
        if name not in self._bytes:
            stored = self._stored(name)
            if stored.dtype != torch.uint8 or stored.dim() != 1:
                raise CheckpointError(f"{short(name)} holds no bytes of an array")
            self._bytes[name] = stored.numpy(force=True).copy()
        return self._bytes[name]

    def _stored(self, name: Any) -> Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise CheckpointError(f"there is no tensor {short(name)}")
        return self._tensors[name]


def _number(dtype_name: Any, data: bytes) -> Any:
    dtype = numpy_dtype(dtype_name)
    if len(data) != dtype.itemsize:
        raise CheckpointError(f"a number of {dtype.itemsize} bytes is not made of {len(data)}")
    return array_of(np.frombuffer(data, np.uint8), dtype, ())[()]
