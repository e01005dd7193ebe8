"""The decoder: makes a tree of state of a skeleton and tensors, whoever wrote the two."""

import math
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.checkpoint.layout import DTYPES, array_of, bytes_of, numpy_dtype, require_dense, sizes
from unisono.errors import CheckpointError
from unisono.received import short

# How values that JSON does not have are written by means of those that it has.

MARK = "~"
"""A JSON object whose only key is this stands for something that JSON does not have: ``{"~": [kind, …]}``."""

DEEPEST = 100
"""How many levels of containers a state may have: far more than any has, and few enough to be read back."""

_DEVICE = re.compile(r"[a-z]{1,16}(:[0-9]{1,4})?")


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write values of one type by means of simpler ones.

    Attributes:
        kind: the type of these values.
        written: the type of the simpler value.
        simpler: a function that makes the simpler value.
        build: the inverse function, which may raise anything for a value that was never written.
    """

    kind: type
    written: type
    simpler: Callable[[Any], Any]
    build: Callable[[Any], Any]


def _deque(parts: dict[str, Any]) -> deque[Any]:
    if parts.keys() != {"parts", "maxlen"} or type(parts["parts"]) is not list:
        raise CheckpointError("a deque has parts, and maxlen")
    return deque(parts["parts"], parts["maxlen"])


def _float(text: str) -> float:
    found: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return found


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
    "float": Form(float, str, lambda it: struct.pack(">d", it).hex(), _float),
    "complex": Form(complex, list, lambda it: [it.real, it.imag], _complex),
    "dtype": Form(torch.dtype, str, lambda it: str(it).removeprefix("torch."), lambda it: DTYPES[it]),
    "device": Form(torch.device, str, str, _device),
}
KINDS = {form.kind: kind for kind, form in FORMS.items()}


def is_plain(value: Any) -> bool:
    """Whether JSON has this value, other than a list or an object."""
    kind = type(value)
    return value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value))


# From a skeleton and tensors to a tree of state, whoever wrote the two.

_LEVELS = 2 * DEEPEST + 8
"""Of lists and objects in a skeleton that stands for a tree of at most ``DEEPEST`` levels."""


class Decoder:
    """Puts one tree together.

    Args:
        tensors: those that the skeleton refers to, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._laid: dict[str, Tensor] = {}
        self._paired: dict[int, Tensor] = {}
        self._bytes: dict[str, np.ndarray[Any, Any]] = {}

    def tree(self, skeleton: Any) -> Any:
        """What a skeleton stands for.

        Raises:
            CheckpointError: it is none; says what is wrong.
        """
        try:
            return self._decode(skeleton, 0)
        except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, struct.error) as error:
            raise CheckpointError(f"it says what was never written: {type(error).__name__}: {error}"[:400]) from error

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
                return self._built(kind, self._decode(simpler, depth))
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

    def _built(self, kind: str, simpler: Any) -> Any:
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
        if name not in self._laid:
            stored = self._stored(name)
            if strides is not None and list(stored.stride()) != strides:
                require_dense(stored.shape, strides)
                laid = torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device=stored.device)
                stored = laid.copy_(stored)
            self._laid[name] = stored
        return self._laid[name]

    def _complex(self, pairs: Any) -> Tensor:
        """Float64 pairs as complex128: a view. Safetensors does not have complex128."""
        if not isinstance(pairs, Tensor) or pairs.dtype != torch.float64 or pairs.shape[-1:] != (2,):
            raise CheckpointError("complex128 is not made of anything but pairs of float64")
        return self._paired.setdefault(id(pairs), torch.view_as_complex(pairs))

    def _array(self, dtype_name: Any, shape: list[int], names: list[Any]) -> np.ndarray[Any, Any]:
        dtype = numpy_dtype(dtype_name)
        needed = bytes_of(shape, dtype.itemsize)
        data = self._data(names[0]) if names else np.empty(0, np.uint8)
        if data.size != needed:
            raise CheckpointError(f"an array of {needed} bytes is not made of {data.size}")
        return array_of(data, dtype, shape) if needed else np.empty(shape, dtype)

    def _data(self, name: Any) -> np.ndarray[Any, Any]:
        """A copy of a tensor's bytes. There is one of each, or a few names could stand for any amount of memory."""
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
