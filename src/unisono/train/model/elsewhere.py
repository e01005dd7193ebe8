"""Values of a forward pass that another device computes."""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from unisono.errors import ModelError

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("neg", "abs", "invert", "getitem", "eq", "ne", "lt", "le", "gt", "ge"),
)

_TURNED = ("add", "sub", "mul", "truediv", "floordiv", "pow", "matmul")

_IN_PLACE = {f"__{name}__" for name in ("setitem", *(f"i{each}" for each in (*_TURNED, "mod", "and", "or", "xor")))}
"""Methods that change a tensor."""

_NOT_HERE: Any = object()

NOT_HANDED_ON = (
    "a value that the model returns from an earlier stage, and that another device has: hand it on from one module "
    "to the next, up to the last one"
)
"""What is wrong with what comes of the last stage."""

_LOOKS = frozenset(("size", "dim", "numel", "item", "tolist", "stride", "is_contiguous", "numpy", "data_ptr"))
"""Methods of tensors that return no tensor."""


class Elsewhere:
    """A tensor that an earlier stage has computed on another device; what is made of it is one as well.

    Code of a model that stands between its stages runs on every device. Where it works on what is not there, it makes
    more of that, until it comes to the stage that is to be computed.

    Attributes:
        value: what it is, once it has been received.
        draw: a function that sets the random generators as they were when it was received.
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
    def _refuse(what: str) -> NoReturn:
        raise ModelError(
            f"the forward pass asks for {what} of a value that another stage computes, in code between the modules: "
            f"here that value is not known. Put that code into a module; it then runs in that module's stage alone"
        )


class _Method:
    """A method of a tensor that is not there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Elsewhere:
        return Elsewhere()


def _unpacked(caller: Any) -> int:
    """Into how many names a value is unpacked just now, as torch.fx finds it out; 0 if it is not."""
    at = next(each for each in dis.get_instructions(caller.f_code) if each.offset == caller.f_lasti)
    return int(at.argval) if at.opname == "UNPACK_SEQUENCE" else 0


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
    """Lists, tuples and dicts, with the tensors that have been received in their places."""
    return tree_map(lambda leaf: leaf if _is_missing(leaf) or not isinstance(leaf, Elsewhere) else leaf.value, tree)


def all_elsewhere(tree: Any) -> list[Elsewhere]:
    """What stands in lists, tuples and dicts for what was or is elsewhere."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Elsewhere)]


def holds_elsewhere(tree: Any) -> bool:
    """Whether anything in lists, tuples and dicts has not been received."""
    return any(map(_is_missing, tree_leaves(tree)))


def _is_missing(leaf: Any) -> bool:
    return isinstance(leaf, Elsewhere) and leaf.value is _NOT_HERE


def as_received(leaf: Tensor) -> Tensor:
    """A received tensor as the stage sees it: like one that was just computed, so it may be changed in place."""
    return without_view(leaf) if leaf.requires_grad else leaf


def without_view(tensor: Tensor) -> Tensor:
    """The same memory and gradient in a tensor that is neither leaf nor view."""
    found: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return found


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Not a view as torch knows views: those of a leaf nobody may change, and none is detached in place."""
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return alias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """As it comes."""
        return gradients[0]
