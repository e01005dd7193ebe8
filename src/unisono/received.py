"""Bytes that came from a file, a socket or a store, on their way to becoming values."""

import json
import os
import stat
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

from unisono.errors import Unreadable

LARGEST_JSON = 2**28
"""Bytes of a JSON text; the values in it take some twenty times as much memory."""


def parse_json(data: bytes | bytearray | str) -> Any:
    """A value from its JSON text.

    Raises:
        Unreadable: it is too long, no UTF-8, no JSON, or nested too deep.
    """
    if len(data) > LARGEST_JSON:
        raise Unreadable(f"{len(data)} bytes are more than the {LARGEST_JSON} that a JSON text may have")
    try:
        return json.loads(data if isinstance(data, str) else data.decode())
    except RecursionError:
        raise Unreadable("it is nested too deep") from None
    except ValueError as error:
        raise Unreadable(f"it is no JSON: {error}") from error


def parse_object(data: bytes | bytearray | str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        Unreadable: it is none.
    """
    found = parse_json(data)
    if not isinstance(found, dict):
        raise Unreadable(f"it is a JSON {type(found).__name__} and no object")
    return found


def is_text(found: Any) -> bool:
    """Whether this is an object whose values are all text."""
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading; anything else by that name (a pipe, a device) is not waited for.

    Raises:
        OSError: it cannot be opened.
        Unreadable: it is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise Unreadable(f"{path} is no file")
    return file


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError: it cannot be opened or read.
        Unreadable: it is no file, or holds no JSON object.
    """
    with open_file(path) as file:
        return parse_object(file.read(LARGEST_JSON + 1))


@cache
def memory() -> int:
    """Bytes of memory that this host has: nobody is given more, whatever was announced."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
