"""Values of a forward pass that another device computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from unisono.errors import ModelError

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rpow", "rmatmul"),
    *("neg", "abs", "invert", "getitem", "eq", "ne", "lt", "le", "gt", "ge"),
)

_LOOKS = frozenset(("size", "dim", "numel", "item", "tolist", "stride", "is_contiguous", "numpy", "data_ptr"))
"""Methods of tensors that return no tensor."""


class Elsewhere:
    """A tensor that an earlier stage has computed on another device; what is made of it is one as well.

    Code of a model that stands between its stages runs on every device. Where it works on what is not there, it makes
    more of that, until it comes to the stage that is to be computed.

    Attributes:
        value: the tensor, once it has been received.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None) -> Any:
        """What torch calls in place of one of its functions."""
        arguments, named = resolved((args, kwargs or {}))
        if not holds_elsewhere((arguments, named)):
            return func(*arguments, **named)
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(arguments[0], Tensor):
            cls._refuse("its numbers, to write them into a tensor,")
        return cls()

    def __getattr__(self, name: str) -> Any:
        if self.value is not None:
            return getattr(self.value, name)
        if name in ("T", "mT", "H", "mH", "real", "imag", "data"):
            return Elsewhere()
        if name.startswith("__") or name in _LOOKS or not callable(getattr(Tensor, name, None)):
            if name.startswith("__"):
                raise AttributeError(name)
            self._refuse(f".{name}")
        return _Method()

    def __bool__(self) -> bool:
        return bool(self.value) if self.value is not None else self._refuse("its truth")

    def __len__(self) -> int:
        return len(self.value) if self.value is not None else self._refuse("its length")

    def __iter__(self) -> Any:
        return iter(self.value) if self.value is not None else self._refuse("its parts")

    def __float__(self) -> float:
        return float(self.value) if self.value is not None else self._refuse("its number")

    def __int__(self) -> int:
        return int(self.value) if self.value is not None else self._refuse("its number")

    def __setitem__(self, place: Any, value: Any) -> None:
        if self.value is None:
            self._refuse("its parts, to write there")
        self.value[place] = value

    def __hash__(self) -> int:
        return id(self)

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise ModelError(
            f"the forward pass asks for {what} of a value that another stage computes, in code that stands between the "
            f"stages: a model in stages is a chain. Put that code into a module, in the stage that it belongs to"
        )


class _Method:
    """A method of a tensor that is not there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Elsewhere:
        return Elsewhere()


def _operator(name: str) -> Any:
    def operate(self: Elsewhere, *others: Any) -> Any:
        others = resolved(others)
        if self.value is None or holds_elsewhere(others):
            return Elsewhere()
        return getattr(self.value, name)(*others)

    return operate


for _name in _OPERATORS:
    setattr(Elsewhere, f"__{_name}__", _operator(f"__{_name}__"))


def resolved(tree: Any) -> Any:
    """Lists, tuples and dicts, with the tensors that have been received in their places."""
    return tree_map(lambda leaf: leaf.value if isinstance(leaf, Elsewhere) and leaf.value is not None else leaf, tree)


def holds_elsewhere(tree: Any) -> bool:
    """Whether anything in lists, tuples and dicts has not been received."""
    return any(isinstance(leaf, Elsewhere) and leaf.value is None for leaf in tree_leaves(tree))


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


def flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call's arguments, and how they are put together again."""
    return torch.utils._pytree.tree_flatten((args, dict(kwargs)))
