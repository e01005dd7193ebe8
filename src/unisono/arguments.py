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


def require_types(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments whose types differ from a function's annotations.

    Args:
        function: the function, with its annotations.
        arguments: the arguments by name; those without an annotation are not checked.

    Raises:
        JobError: one is of another type; names it, its value and what is expected.
    """
    for name, kind in _annotations(function).items():
        if name in arguments:
            require_type(name, arguments[name], kind)


def require_type(name: str, value: Any, kind: Any) -> None:
    """Refuse a value of another type.

    Raises:
        JobError: it is of another type; names it and what is expected.
    """
    if not _has_type(value, kind):
        raise JobError(f"{name}={short(value)}: needs {' or '.join(_names(kind))}")


def require_parameters(function: Callable[..., Any], arguments: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse arguments for which a function has no parameter.

    Raises:
        JobError: there is such an argument; names it and the parameters with the most similar names.
    """
    parameters = signature(function).parameters
    for name in arguments:
        if name not in parameters:
            similar = get_close_matches(name, parameters, 3)
            hint = f"did you mean {' or '.join(similar)}?" if similar else f"there are {', '.join(parameters)}"
            raise JobError(f"{prefix}{name}={short(arguments[name])}: there is no such argument; {hint}")


def explain_call(error: Exception, function: Any, needs: str) -> None:
    """Refuse an object that cannot be called, or not with these arguments; other errors are left alone.

    Args:
        error: the error of the call, in the function that called.
        function: the object that was called.
        needs: the sentence that says what it should be.

    Raises:
        JobError: the call itself has failed, before the function's first line.
    """
    if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
        raise JobError(f"{needs}: {error if callable(function) else f'{short(function)} is no function'}") from error


@cache
def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(function).items() if name != "return"}


def _has_type(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(_has_type(value, part) for part in get_args(kind))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin is Sequence:
        (item,) = get_args(kind)
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(_has_type(element, item) for element in value)
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
