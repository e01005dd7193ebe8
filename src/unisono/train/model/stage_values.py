"""What goes on from one stage to the next: the arguments of the module at the cut, as tensors and a few numbers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from unisono.errors import ModelError
from unisono.train.model.elsewhere import Elsewhere

# A tensor is its number. What else there is begins with one of these.
_OWN, _NONE, _BOOL, _INT, _FLOAT, _TUPLE, _LIST, _DICT, _NODE = range(-1, -10, -1)

_KINDS: dict[type[Any], int] = {tuple: _TUPLE, list: _LIST, dict: _DICT}


def told(tree: Any, skipped: Callable[[], str]) -> tuple[list[int], list[Tensor]]:
    """A value as numbers, which say how it is made of tensors, and the tensors, each once.

    Args:
        tree: tensors, plain numbers, and lists, tuples and dicts of them. What is none of these the next stage has.
        skipped: why a value cannot go on that is not here.

    Raises:
        ModelError: some value is not here.
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    numbers: list[int] = []

    def tell(value: Any) -> None:
        kind = type(value)
        if isinstance(value, Elsewhere):
            raise ModelError(skipped())
        if isinstance(value, Tensor):
            numbers.append(tensors.setdefault(id(value), (len(tensors), value))[0])
        elif value is None:
            numbers.append(_NONE)
        elif kind is bool or (kind is int and -(2**63) <= value < 2**63):
            numbers.extend((_BOOL if kind is bool else _INT, int(value)))
        elif kind is float:
            numbers.extend((_FLOAT, *struct.unpack("<q", struct.pack("<d", value))))
        elif (parts := _parts(value)) is None or (kind is dict and not all(type(key) is str for key in value)):
            numbers.append(_OWN)
        else:
            numbers.extend((_KINDS.get(kind, _NODE), len(parts)))
            for key in value if kind is dict else ():
                numbers.extend(_text(key))
            for part in parts:
                tell(part)

    tell(tree)
    return numbers, [tensor for _, tensor in tensors.values()]


def heard(numbers: Sequence[int], tensors: Sequence[Tensor], own: Any) -> Any:
    """The inverse of :func:`told`.

    Args:
        numbers: the numbers.
        tensors: the tensors.
        own: the value as it is on this device, with :class:`Elsewhere` for what came of earlier stages; these get it.

    Raises:
        ModelError: the value on this device has another form.
    """
    left = iter(numbers)
    try:
        found = _heard(left, tensors, own)
    except (StopIteration, IndexError, UnicodeDecodeError, struct.error) as error:
        raise ModelError("is of another form than on the device before") from error
    if next(left, None) is not None:
        raise ModelError("is of another form than on the device before")
    return found


def _heard(left: Iterator[int], tensors: Sequence[Tensor], own: Any) -> Any:
    code, is_here = next(left), not isinstance(own, Elsewhere)
    if code == _OWN or (code == _NODE and not is_here):
        if is_here:
            return own
        raise ModelError("gets a value that is no tensor, number, list, tuple or dict of them")
    if code >= 0:
        found: Any = tensors[code]
    elif code == _NONE:
        found = None
    elif code in (_BOOL, _INT):
        found = (bool if code == _BOOL else int)(next(left))
    elif code == _FLOAT:
        (found,) = struct.unpack("<d", struct.pack("<q", next(left)))
    else:
        found = _node(code, left, tensors, own)
    if not is_here:  # it may be used again, also behind the next module
        own.value = found
    return found


def _node(code: int, left: Iterator[int], tensors: Sequence[Tensor], own: Any) -> Any:
    count = next(left)
    keys = [_read_text(left) for _ in range(count)] if code == _DICT else []
    is_here = not isinstance(own, Elsewhere)
    parts = _parts(own) if is_here else [Elsewhere() for _ in range(count)]
    if parts is None or len(parts) != count or (is_here and _KINDS.get(type(own), _NODE) != code):
        raise ModelError("is of another form than on the device before")
    found = [_heard(left, tensors, part) for part in parts]
    if code == _DICT:
        return dict(zip(keys, found, strict=True))
    if code == _NODE:
        node = pytree.SUPPORTED_NODES[pytree._get_node_type(own)]
        return node.unflatten_fn(found, node.flatten_fn(own)[1])
    return (tuple if code == _TUPLE else list)(found)


def _parts(value: Any) -> list[Any] | None:
    """What a list, tuple, dict or the like is made of; None for what is none."""
    if type(value) is dict:
        return list(value.values())
    kind = pytree._get_node_type(value)
    return pytree.SUPPORTED_NODES[kind].flatten_fn(value)[0] if kind in pytree.SUPPORTED_NODES else None


def _text(text: str) -> Iterator[int]:
    data = text.encode()
    yield len(data)
    for start in range(0, len(data), 7):
        yield int.from_bytes(data[start : start + 7], "little")


def _read_text(left: Iterator[int]) -> str:
    length = next(left)
    data = b"".join(next(left).to_bytes(7, "little", signed=False) for _ in range(0, length, 7))
    return data[:length].decode()
