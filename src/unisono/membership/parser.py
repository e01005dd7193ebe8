"""The parser: makes messages of received bytes, within limits that hold before anything is parsed."""

import re
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from unisono.errors import Unreadable
from unisono.membership.messages import LARGEST_VALUE

LONGEST_MESSAGE = LARGEST_VALUE + 2**16
"""Bytes of a message: the largest value, and what is around it."""

DEEPEST = 8
"""Lists and objects inside each other."""

MOST_PARTS = 20_000
"""Names, texts, brackets and commas."""

_LONG_NUMBER = 300  # digits; turning very long ones into a number takes for ever
_PARTS = re.compile(rf'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{{}},]|[0-9]{{{_LONG_NUMBER}}}', re.DOTALL)

M = TypeVar("M")


def parse(adapter: TypeAdapter[M], data: str | bytes) -> M:
    """A message, or another validated value, from its JSON text. The error does not repeat what came.

    Raises:
        Unreadable: it is too long, nested too deep, has too many parts, or is no such value.
    """
    if len(data) > LONGEST_MESSAGE:
        raise Unreadable(f"a message has at most {LONGEST_MESSAGE} bytes")
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError as error:
        raise Unreadable("a message is UTF-8 text") from error
    _check_shape(text)
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise Unreadable(_first(error)) from error


def _check_shape(text: str) -> None:
    if len(text) < _LONG_NUMBER and text.count("[") + text.count("{") <= DEEPEST:
        return  # as nearly all messages: it can pass no limit
    depth = 0
    for number, found in enumerate(_PARTS.finditer(text)):
        if number >= MOST_PARTS:
            raise Unreadable(f"a message has at most {MOST_PARTS} parts")
        match found[0][0]:
            case "[" | "{":
                depth += 1
                if depth > DEEPEST:
                    raise Unreadable(f"a message is nested at most {DEEPEST} deep")
            case "]" | "}":
                depth -= 1
            case '"' | ",":
                pass
            case _:
                raise Unreadable(f"a number has fewer than {_LONG_NUMBER} digits")


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in found["loc"])
    return f"{where}: {found['msg']}"[:200] if where else found["msg"][:200]
