"""How values that JSON does not have are written by means of those that it has."""

import math
import re
import struct
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch

from unisono.checkpoint.layout import DTYPES, sizes
from unisono.errors import CheckpointError

MARK = "~"
"""A JSON object whose only key is this stands for something that JSON does not have: ``{"~": [kind, …]}``."""

DEEPEST = 100
"""How many levels of containers a state may have: far more than any has, and few enough to be read back."""

_DEVICE = re.compile(r"[a-z]{1,16}(:[0-9]{1,4})?")


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one type are written by means of simpler ones.

    Attributes:
        kind: their type.
        written: the type of the simpler value.
        simpler: makes it.
        build: the inverse, which may raise anything for a value that was never written.
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
