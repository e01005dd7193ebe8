"""The types of the arguments with which a script calls us: what their annotations say holds when it runs, too."""

import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from inspect import signature
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from unisono.errors import JobError
from unisono.received import short

PLAIN: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "None",
    os.PathLike: "a path",
    Mapping: "a dict",
}
"""The types that have a plain name."""


def require_kinds(function: Callable[..., Any], said: Mapping[str, Any]) -> None:
    """Refuse arguments of other types than a function says.

    Args:
        function: the function, with its annotations.
        said: arguments by name; what the function has no annotation for is left alone.

    Raises:
        JobError: one is of another type; names it, its value and what is expected.
    """
    for name, kind in _kinds(function).items():
        if name in said:
            require_kind(name, said[name], kind)


def require_kind(name: str, value: Any, kind: Any) -> None:
    """Refuse a value of another type.

    Raises:
        JobError: it is of another type; names it and what is expected.
    """
    if not _is_one(kind, value):
        raise JobError(f"{name}={short(value)}: needs {' or '.join(_names(kind))}")


def require_known(function: Callable[..., Any], said: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse arguments that a function does not have.

    Raises:
        JobError: there is one; names it and those that are nearest to it.
    """
    known = signature(function).parameters
    for name in said:
        if name not in known:
            near = get_close_matches(name, known, 3)
            meant = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise JobError(f"{prefix}{name}={short(said[name])}: there is no such argument; {meant}")


def explain_call(error: Exception, function: Any, needs: str) -> None:
    """Refuse what cannot be called, or not with the arguments that it gets; does nothing with other errors.

    Args:
        error: the error of the call, in the function that called.
        function: the thing that was called.
        needs: the sentence that says what it should be.

    Raises:
        JobError: the call has not even begun.
    """
    if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
        raise JobError(f"{needs}: {error if callable(function) else f'{short(function)} is no function'}") from error


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(function).items() if name != "return"}


def _is_one(kind: Any, value: Any) -> bool:
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is_one(part, value) for part in get_args(kind))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin is Sequence:
        (item,) = get_args(kind)
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(_is_one(item, element) for element in value)
        )
    if kind in (int, float):
        return isinstance(value, int if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind if origin is None else origin)


def _names(kind: Any) -> list[str]:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return [name for part in get_args(kind) for name in _names(part)]
    if origin is Literal:
        return [repr(part) for part in get_args(kind)]
    if origin is Sequence:
        return [f"a list, each {' or '.join(_names(get_args(kind)[0]))}"]
    if origin is Callable:
        return ["a function"]
    plain = kind if origin is None else origin
    return [PLAIN.get(plain, f"a {plain.__module__.partition('.')[0]}.{plain.__name__}")]
