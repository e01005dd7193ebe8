"""Bytes that came from a file, a socket or a store, on their way to becoming values; and who has sent them."""

import errno
import importlib
import json
import os
import re
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from reprlib import Repr
from traceback import extract_tb
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from unisono.errors import JobError, Unreadable

LONGEST_S = 1e9
"""Seconds: some thirty years. Systems cannot wait for much more."""

LONGEST_SHOWN = 160
"""Characters of a value in a message: a path or a setting whole, and of more its two ends."""

LARGEST_JSON = 2**28
"""Bytes of a JSON text; the values in it take some twenty times as much memory."""


class _Short(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = LONGEST_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write numbers of thousands of digits.
        return super().repr_int(x, level) if x.bit_length() < 2**12 else f"<a number of {x.bit_length()} bits>"


short = _Short().repr
"""A value as ``repr`` writes it, for a message: cut in its middle if it is long."""


# Numbers as people write them. Python's own readers take the digits of every script, underscores, spaces and nan, too.


def whole_number(text: str) -> int | None:
    """A whole number of at most 18 digits from its text; None if it is none."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None


def decimal_number(text: str) -> float | None:
    """A decimal number from its text, with a point and an exponent or without; None if it is none."""
    return float(text) if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", text) else None


def parse_json(data: bytes | bytearray | str, most: int = LARGEST_JSON) -> Any:
    """A value from its JSON text.

    Args:
        data: the text.
        most: bytes, or characters, that it may have.

    Raises:
        Unreadable: it is too long, no UTF-8, no JSON, or nested too deep.
    """
    if len(data) > most:
        raise Unreadable(f"{len(data)} bytes are more than the {most} that a JSON text may have")
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


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading; anything else by that name (a pipe, a device) is not waited for.

    Raises:
        OSError: it cannot be opened.
        Unreadable: it is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise Unreadable(f"{path} is no file")


def read_part(path: Path, first: int, most: int) -> bytes:
    """Some bytes of a file, which somebody may be writing just now; none of one that is not there.

    Args:
        path: the path of the file.
        first: the number of the first byte.
        most: the largest number of bytes; fewer are the file's end.

    Raises:
        OSError: it cannot be opened or read.
        Unreadable: it is no file.
    """
    try:
        with open_file(path) as file:
            return os.pread(file.fileno(), most, first)
    except FileNotFoundError:
        return b""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError: it cannot be opened or read.
        Unreadable: it is no file, or holds no JSON object.
    """
    with open_file(path) as file:
        return parse_object(file.read(LARGEST_JSON + 1))


def value_of(kind: Any, found: Any, what: str = "it") -> Any:
    """A value of a type, made of the plain ones that it was kept as. Numbers stay what they are.

    Args:
        kind: bool, int, float (which an int may stand for) or str; None, or anything (``Any``); a data class, of which
            the fields are there by name; ``tuple``, ``list``, ``Sequence``, ``dict`` or ``Mapping`` of these; several
            with ``|``; or types by name, for an object that has all of these names and no others.
        found: the plain value.
        what: it is, for people.

    Raises:
        Unreadable: it is no such value; says where.
    """
    if kind is Any:
        return found
    if type(kind) is type and kind in _PLAIN:  # in each step, of each shard
        return _plain(kind, found, what)
    if isinstance(kind, Mapping) or is_dataclass(kind):
        return _fields_of(kind, found, what)
    match get_origin(kind):
        case origin if origin in (Union, UnionType):
            return _one_of(get_args(kind), found, what)
        case origin if origin in (tuple, list, Sequence):
            return _items_of(kind, found, what)
        case origin if origin in (dict, Mapping):
            _require(type(found) is dict, "object", found, what)
            key, value = get_args(kind)
            return {
                value_of(key, name, f"a name in {what}"): value_of(value, each, f"{what}.{short(name)}")
                for name, each in found.items()
            }
    return _plain(NoneType if kind is None else kind, found, what)


_PLAIN = (bool, int, float, str)


def _plain(kind: type, found: Any, what: str) -> Any:
    is_one = isinstance(found, (int, float) if kind is float else kind)
    _require(is_one and (kind is bool or type(found) is not bool), kind.__name__, found, what)
    _require(not isinstance(found, int) or abs(found) < 2**64, "number of 64 bits", found, what)
    return found


def _fields_of(kind: Any, found: Any, what: str) -> Any:
    forms = kind if isinstance(kind, Mapping) else _hints(kind)
    _require(type(found) is dict and found.keys() <= forms.keys(), f"object of {', '.join(forms)}", found, what)
    values = {name: value_of(forms[name], each, f"{what}.{name}") for name, each in found.items()}
    try:
        if isinstance(kind, type):
            return kind(**values)
    except (TypeError, ValueError) as error:  # what it cannot do without is not there, or out of range
        raise Unreadable(f"{what} is no {kind.__name__}: {error}") from error
    _require(values.keys() == forms.keys(), f"object of {', '.join(forms)}", found, what)
    return values


def _items_of(kind: Any, found: Any, what: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    _require(type(found) in (list, tuple), "list", found, what)
    if origin is tuple and parts[-1] is not Ellipsis:
        _require(len(found) == len(parts), f"list of {len(parts)}", found, what)
    else:
        parts = (parts[0],) * len(found)
    items = [value_of(part, each, f"{what}[{at}]") for at, (part, each) in enumerate(zip(parts, found, strict=True))]
    return items if origin is list else tuple(items) if origin is tuple else type(found)(items)


def _one_of(kinds: Sequence[Any], found: Any, what: str) -> Any:
    """The first that fits; if none does, what is wrong with the last that is not None."""
    wrong: Unreadable | None = None
    for kind in kinds:
        try:
            return value_of(kind, found, what)
        except Unreadable as error:
            wrong = wrong if kind is NoneType and wrong is not None else error
    raise wrong or Unreadable(f"{what} is of no known type")


def _require(is_right: bool, kind: str, found: Any, what: str) -> None:
    if not is_right:
        raise Unreadable(f"{what} is {short(found)}, and no {kind}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def memory() -> int:
    """Bytes of memory that this host has: nobody is given more, whatever was announced."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# What is named by text, as in ``module:name``.


PYTHONS_OWN = os.path.dirname(importlib.__file__)  # noqa: PTH120 (as frames have it)
"""Where modules are imported from within."""


def imported(text: str, where: str) -> Any:
    """What a text such as ``module:name`` stands for.

    Args:
        text: the text.
        where: the variable or option that it stands in, for errors.

    Raises:
        JobError: it has another form, or cannot be imported; names it and says why, and where in the module.
    """
    said = f"{where}={short(text)}"
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise JobError(f"{said}: write module:name, as in package.module:name")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a module of the user does)
        raise JobError(f"{said} cannot be imported: {why_of(error)}") from None
    if not hasattr(found, name):
        raise JobError(f"{said}: {module} has no {name}")
    return getattr(found, name)


def why_of(error: BaseException) -> str:
    """An error of somebody else's code in a line: its type, its words, and the line that raised it."""
    frames = [
        frame for frame in extract_tb(error.__traceback__)[1:] if not frame.filename.startswith(("<", PYTHONS_OWN))
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_SHOWN]}{place}"


# Who is at the other end of a Unix socket, by the word of the kernel.

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this one, whoever has called and whoever answers."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return bool(user == os.geteuid())
