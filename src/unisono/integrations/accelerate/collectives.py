"""accelerate's functions that processes call together: they go by the accelerator that is in use, or are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any

from accelerate.utils import operations

NAMES = ("gather", "gather_object", "broadcast", "broadcast_object_list", "reduce", "pad_across_processes")
"""The functions of ``accelerate.utils``."""

IN_USE: ContextVar[Any] = ContextVar("IN_USE", default=None)
"""The newest accelerator of this thread."""


def _route(*values: Any, **named: Any) -> Any:
    return unisono_call("NAME", values, named)  # of accelerate's module, with whose global names this runs


def call(name: str, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Call a function's stand-in.

    Raises:
        JobError: it cannot be kept where it stands.
    """
    accelerator, argument = IN_USE.get(), [*values, *named.values()][0]
    match name:
        case "gather" | "gather_object":
            return accelerator.gather(argument)
        case "broadcast":
            return accelerator.from_main(argument)
        case "broadcast_object_list":
            argument[:] = accelerator.from_main(list(argument))
            return argument
    return getattr(accelerator, name)(*values, **named)


unisono_call = call


_own_code: dict[FunctionType, CodeType] = {}
_users: list[Any] = []
"""Accelerators whose runs are open: the functions have their own code again behind the last one."""


def routed(accelerator: Any) -> Callable[[], None]:
    """Have the functions go by an accelerator. Returns a function that undoes it.

    Scripts hold these functions under names of their own, so each stays the object that it is, and has other code.
    """
    IN_USE.set(accelerator)
    _users.append(accelerator)
    vars(operations)["unisono_call"] = call
    for function in [inspect.unwrap(getattr(operations, name)) for name in NAMES]:
        _own_code.setdefault(function, function.__code__)
        constants = (function.__name__ if value == "NAME" else value for value in _route.__code__.co_consts)
        function.__code__ = _route.__code__.replace(co_consts=tuple(constants))

    def undo() -> None:
        _users.remove(accelerator)
        if not _users:
            for function, code in _own_code.items():
                function.__code__ = code
            _own_code.clear()
            del vars(operations)["unisono_call"]

    return undo
