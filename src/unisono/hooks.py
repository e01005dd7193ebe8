"""One call for a method of several objects: only those are called whose class has one of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Method = Callable[..., Any]


def own_methods(base: type, name: str, objects: Sequence[object]) -> tuple[Method, ...]:
    """The methods of this name that replace the one of a base class, in the order of their objects."""
    return tuple(getattr(owner, name) for owner in objects if getattr(type(owner), name) is not getattr(base, name))


def together(methods: Sequence[Method]) -> Method:
    """Calls all of these with the same arguments, one after the other; returns nothing."""
    return methods[0] if len(methods) == 1 else partial(_call_all, tuple(methods))


def _call_all(methods: Sequence[Method], *arguments: Any, **named: Any) -> None:
    for method in methods:
        method(*arguments, **named)
