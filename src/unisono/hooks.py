"""One function that calls a method of several objects, without those whose class has only the base class's method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Method = Callable[..., Any]


def own_methods(base: type, name: str, objects: Sequence[object]) -> tuple[Method, ...]:
    """The methods of this name that replace the one of a base class, in the order of their objects."""
    return tuple(getattr(owner, name) for owner in objects if getattr(type(owner), name) is not getattr(base, name))


def together(methods: Sequence[Method]) -> Method:
    """A function that calls all of these methods with its arguments, one after the other, and returns nothing."""
    return methods[0] if len(methods) == 1 else partial(_call_all, tuple(methods))


def _call_all(methods: Sequence[Method], *arguments: Any, **named: Any) -> None:
    for method in methods:
        method(*arguments, **named)
