"""Values of a forward pass that another device computes, and how they go from one stage to the next."""

from __future__ import annotations

import dis
import operator
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves, tree_map

from unisono.errors import ModelError

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("neg", "abs", "invert", "getitem", "eq", "ne", "lt", "le", "gt", "ge"),
)

_TURNED = ("add", "sub", "mul", "truediv", "floordiv", "pow", "matmul")
"""Operators that also have a reflected method, such as ``__radd__``."""

_IN_PLACE = {f"__{name}__" for name in ("setitem", *(f"i{base}" for base in (*_TURNED, "mod", "and", "or", "xor")))}
"""Methods that change a tensor."""

_NOT_HERE: Any = object()
"""Stands for a value that has not been received."""

NOT_HANDED_ON = (
    "a tensor that the model returns from an earlier stage, and that is on another device: pass it through the modules "
    "up to the last one"
)
"""Why the result of the last stage cannot be used."""

_LOOKS = frozenset(("size", "dim", "numel", "item", "tolist", "stride", "is_contiguous", "numpy", "data_ptr"))
"""Methods of tensors that return no tensor."""


class Elsewhere:
    """A tensor that an earlier stage has computed on another device.

    The code of a model between its stages runs on every device. On a device that does not have the value, every
    operation on it returns another ``Elsewhere``, until the forward pass reaches the stage that this device computes.

    Attributes:
        value: the value, once it has been received.
        draw: a function that sets the random generators to their state when the value was received.
    """

    __slots__ = ("draw", "value")

    def __init__(self) -> None:
        self.value: Any = _NOT_HERE
        self.draw: Callable[[], None] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None) -> Any:
        """What torch calls in place of one of its functions."""
        arguments, named = resolved((args, kwargs or {}))
        if not holds_elsewhere((arguments, named)):
            return func(*arguments, **named)
        name = getattr(func, "__name__", "")
        writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if (writes and isinstance(arguments[0], Tensor)) or isinstance(named.get("out"), Tensor):
            cls._refuse("the numbers, to write them into a tensor,")
        return cls()

    def __getattr__(self, name: str) -> Any:
        if self.value is not _NOT_HERE:
            return getattr(self.value, name)
        if name in ("T", "mT", "H", "mH", "real", "imag", "data"):
            return Elsewhere()
        if name.startswith("__") or name in _LOOKS or not callable(getattr(Tensor, name, None)):
            if name.startswith("__"):
                raise AttributeError(name)
            self._refuse(f".{name}")
        return _Method()

    def __bool__(self) -> bool:
        return bool(self.value) if self.value is not _NOT_HERE else self._refuse("the truth (if, while, and, or)")

    def __len__(self) -> int:
        return len(self.value) if self.value is not _NOT_HERE else self._refuse("the length")

    def __iter__(self) -> Any:
        if self.value is not _NOT_HERE:
            return iter(self.value)
        wanted = _unpacked(sys._getframe(1))
        return iter([Elsewhere() for _ in range(wanted)]) if wanted else self._refuse("the parts")

    def __float__(self) -> float:
        return float(self.value) if self.value is not _NOT_HERE else self._refuse("the number")

    def __int__(self) -> int:
        return int(self.value) if self.value is not _NOT_HERE else self._refuse("the number")

    def __setitem__(self, place: Any, value: Any) -> None:
        if self.value is _NOT_HERE:
            self._refuse("the parts, to write there,")
        self.value[place] = value

    def __hash__(self) -> int:
        return id(self)

    @staticmethod
    def _refuse(use: str) -> NoReturn:
        raise ModelError(
            f"code between the model's modules uses {use} of a value that another device computes, and that is not "
            f"known here: move this code into a module, which then runs on the device of its stage alone"
        )


class _Method:
    """A method of a tensor whose value is not known here."""

    def __call__(self, *args: Any, **kwargs: Any) -> Elsewhere:
        return Elsewhere()


def _unpacked(caller: Any) -> int:
    """The number of names into which a value is being unpacked, found as torch.fx does; 0 if it is not unpacked."""
    instruction = next(step for step in dis.get_instructions(caller.f_code) if step.offset == caller.f_lasti)
    return int(instruction.argval) if instruction.opname == "UNPACK_SEQUENCE" else 0


def _operator(name: str, *, turned: bool) -> Any:
    operation = getattr(operator, f"__{name}__")

    def operate(self: Elsewhere, *others: Any) -> Any:
        others = resolved(others)
        if self.value is _NOT_HERE or holds_elsewhere(others):
            return Elsewhere()
        return operation(*others, self.value) if turned else operation(self.value, *others)

    return operate


for _name in _OPERATORS:
    setattr(Elsewhere, f"__{_name}__", _operator(_name, turned=False))
for _name in _TURNED:
    setattr(Elsewhere, f"__r{_name}__", _operator(_name, turned=True))


def resolved(tree: Any) -> Any:
    """Lists, tuples and dicts, with each received tensor in the place of its ``Elsewhere``."""
    return tree_map(lambda leaf: leaf if _is_missing(leaf) or not isinstance(leaf, Elsewhere) else leaf.value, tree)


def all_elsewhere(tree: Any) -> list[Elsewhere]:
    """Every ``Elsewhere`` in lists, tuples and dicts, whether received or not."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Elsewhere)]


def holds_elsewhere(tree: Any) -> bool:
    """Whether lists, tuples and dicts hold a value that has not been received."""
    return any(map(_is_missing, tree_leaves(tree)))


def _is_missing(leaf: Any) -> bool:
    return isinstance(leaf, Elsewhere) and leaf.value is _NOT_HERE


def as_received(leaf: Tensor) -> Tensor:
    """A received tensor as the stage sees it: like one that was just computed, so that it may be changed in place."""
    return without_view(leaf) if leaf.requires_grad else leaf


def without_view(tensor: Tensor) -> Tensor:
    """A tensor with the same memory and gradient that is neither a leaf nor a view."""
    alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return alias


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Make a tensor that torch does not take for a view: it forbids changing a view of a leaf in place."""
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return alias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


# A tensor is encoded by its number, which is not negative. Any other value begins with one of these codes.
_OWN, _NONE, _BOOL, _INT, _FLOAT, _TUPLE, _LIST, _DICT, _NODE = range(-1, -10, -1)

_KINDS: dict[type[Any], int] = {tuple: _TUPLE, list: _LIST, dict: _DICT}


def encode(tree: Any, skipped: Callable[[], str]) -> tuple[list[int], list[Tensor]]:
    """Encode a value as numbers, which say how it is made of tensors, and the tensors, each once.

    Args:
        tree: tensors, plain numbers, and lists, tuples and dicts of them. Of any other value, the next stage uses its
            own.
        skipped: a function that returns the error message for a value that is not here.

    Raises:
        ModelError: some value is not here.
    """
    tensors: dict[int, tuple[int, Tensor]] = {}
    numbers: list[int] = []

    def add(value: Any) -> None:
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
                add(part)

    add(tree)
    return numbers, [tensor for _, tensor in tensors.values()]


def decode(numbers: Sequence[int], tensors: Sequence[Tensor], own: Any) -> Any:
    """Decode what :func:`encode` has encoded.

    ``own`` is the value on this device, with an :class:`Elsewhere` for each result of earlier stages; these get their
    values.

    Raises:
        ModelError: the value on this device has another form.
    """
    remaining = iter(numbers)
    try:
        value = _decode(remaining, tensors, own)
    except (StopIteration, IndexError, UnicodeDecodeError, struct.error) as error:
        raise ModelError("is of another form than on the device before") from error
    if next(remaining, None) is not None:
        raise ModelError("is of another form than on the device before")
    return value


def _decode(left: Iterator[int], tensors: Sequence[Tensor], own: Any) -> Any:
    code, is_here = next(left), not isinstance(own, Elsewhere)
    if code == _OWN or (code == _NODE and not is_here):
        if is_here:
            return own
        raise ModelError("gets a value that is no tensor, number, list, tuple or dict of them")
    if code >= 0:
        value: Any = tensors[code]
    elif code == _NONE:
        value = None
    elif code in (_BOOL, _INT):
        value = (bool if code == _BOOL else int)(next(left))
    elif code == _FLOAT:
        (value,) = struct.unpack("<d", struct.pack("<q", next(left)))
    else:
        value = _node(code, left, tensors, own)
    if not is_here:  # the model may use it again, also after the next module
        own.value = value
    return value


def _node(code: int, left: Iterator[int], tensors: Sequence[Tensor], own: Any) -> Any:
    count = next(left)
    keys = [_read_text(left) for _ in range(count)] if code == _DICT else []
    is_here = not isinstance(own, Elsewhere)
    parts = _parts(own) if is_here else [Elsewhere() for _ in range(count)]
    if parts is None or len(parts) != count or (is_here and _KINDS.get(type(own), _NODE) != code):
        raise ModelError("is of another form than on the device before")
    values = [_decode(left, tensors, part) for part in parts]
    if code == _DICT:
        return dict(zip(keys, values, strict=True))
    if code == _NODE:
        node = pytree.SUPPORTED_NODES[pytree._get_node_type(own)]
        return node.unflatten_fn(values, node.flatten_fn(own)[1])
    return (tuple if code == _TUPLE else list)(values)


def _parts(value: Any) -> list[Any] | None:
    """The parts of a list, tuple, dict or another node that torch knows; None for any other value."""
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
