"""A digest of what a sample holds, the same in every process that has the same sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from hashlib import blake2b
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor

from unisono.words import Bytes, bytes_of

MOST_BYTES = 2**20
"""Of a tensor, an array or a text: of larger ones, blocks are looked at that lie evenly."""

BLOCKS = 64

MOST_ITEMS = 16
"""Of a list of things that are no numbers: of longer ones, items are looked at that lie evenly."""

DEEPEST = 8
"""Lists and mappings in each other, and no more."""

MOST_PARTS = 2**12
"""Of a sample with all that lies in it, which may be itself again: one that has more is left out."""

LEFT_OUT = b""
"""Stands for what cannot be told from others of its kind: samples are never called different because of it."""

Part = Any  # bytes, or an array of them


def digest_of(value: Any) -> str:
    """A digest of tensors, arrays, images, numbers, text, and lists, mappings and data classes of them.

    It goes by bytes, so NaN is equal to itself. Of an absolute path only the last part counts, since each host may have
    a copy of its own; of mappings and sets the order does not count. All else is left out.
    """
    try:
        return _digest(value, _Walk()).hex()
    except _TooManyPartsError:  # nothing of it counts: a set's first ones are others in each process
        return _digest(LEFT_OUT, _Walk()).hex()


class _TooManyPartsError(Exception):
    """Ends a walk."""


@dataclass
class _Walk:
    """Where in a sample it is looked at, and how many parts were looked at."""

    depth: int = 0
    parts: int = 0


def _digest(value: Any, walk: _Walk) -> bytes:
    walk.parts += 1
    if walk.parts > MOST_PARTS:
        raise _TooManyPartsError
    walk.depth += 1
    try:
        parts: list[Part] = list(_parts(value, walk)) if walk.depth <= DEEPEST else []
    except _TooManyPartsError:
        raise
    except Exception:  # noqa: BLE001 (whatever it is, it cannot be compared)
        parts = [LEFT_OUT]
    finally:
        walk.depth -= 1
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part)
    return digest.digest()


def _parts(value: Any, walk: _Walk) -> Iterator[Part]:
    match value:
        case np.ndarray() | np.generic():
            yield from _array(np.asarray(value), walk)
        case None | bool() | int() | date() | time() | timedelta() | Decimal() | Fraction():
            yield str(value).encode()
        case float() | complex():
            yield from _array(np.asarray(value), walk)
        case str() | PurePath():
            text = str(value)
            named = text.rstrip("/").rpartition("/")[2] if text.startswith("/") else text
            yield from _bounded(named.encode(errors="surrogatepass"))
        case bytes() | bytearray() | memoryview():
            yield from _bounded(bytes(value))
        case Tensor():
            yield f"{value.dtype} {list(value.shape)}".encode()
            yield from _bounded(bytes_of(value.detach().cpu().resolve_conj().resolve_neg().contiguous()))
        case Mapping():
            yield from sorted(_digest(key, walk) + _digest(value[key], walk) for key in value)
        case Set():
            yield from sorted(_digest(item, walk) for item in value)
        case Sequence():
            yield from _sequence(value, walk)
        case _ if is_dataclass(value):
            yield from (_digest(getattr(value, field.name), walk) for field in fields(value))
        case _ if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # an image, say
            yield from _array(np.asarray(value), walk)
        case _:
            yield LEFT_OUT


def _array(value: np.ndarray[Any, Any], walk: _Walk) -> Iterator[Part]:
    kind = value.dtype
    if kind.names:  # there may be anything between its fields
        for name in kind.names:
            yield from _array(value[name], walk)
    elif kind.hasobject:
        yield from _sequence(value.reshape(-1).tolist(), walk)
    elif kind.char not in "gG":  # which have bytes that hold nothing
        yield f"{kind.str} {list(value.shape)}".encode()
        yield from _bounded(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _sequence(value: Sequence[Any], walk: _Walk) -> Iterator[Part]:
    yield str(len(value)).encode()
    if isinstance(value, list | tuple) and value and isinstance(value[0], int | float):
        numbers = np.asarray(value)
        if numbers.dtype.kind in "biuf" and numbers.ndim == 1:
            yield from _array(numbers, walk)
            return
    yield from (_digest(value[place], walk) for place in evenly(len(value), MOST_ITEMS))


def _bounded(data: bytes | Bytes) -> Iterator[Part]:
    yield str(len(data)).encode()
    if len(data) <= MOST_BYTES:
        yield data
        return
    size = MOST_BYTES // BLOCKS
    yield from (data[start : start + size] for start in evenly(len(data) - size + 1, BLOCKS))


def evenly(count: int, most: int) -> list[int]:
    """Numbers below ``count`` that lie evenly, the first and the last one among them; no more than ``most``, from 2."""
    most = min(count, most)
    return [place * (count - 1) // (most - 1) for place in range(most)] if most > 1 else [*range(most)]
