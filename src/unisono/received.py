"""Values from the bytes of files, sockets and stores, and the user at the other end of a socket."""

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
"""The longest time in seconds, some thirty years. Systems cannot wait for much more."""

LONGEST_SHOWN = 160
"""The most characters of a value in a message: of a longer one, both ends are shown."""

LARGEST_JSON = 2**28
"""The most bytes of a JSON text; its values take some twenty times as much memory."""


class _Short(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = LONGEST_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to convert numbers of thousands of digits to text.
        return super().repr_int(x, level) if x.bit_length() < 2**12 else f"<a number of {x.bit_length()} bits>"


short = _Short().repr
"""A value as ``repr`` writes it, for a message: cut in its middle if it is long."""


# Numbers as people write them. Python's own readers also take the digits of every script, underscores, spaces and nan.


def whole_number(text: str) -> int | None:
    """A whole number of at most 18 digits from its text; None if the text is none."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None


def decimal_number(text: str) -> float | None:
    """A decimal number from its text, with a point and an exponent or without; None if the text is none."""
    return float(text) if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", text) else None


def parse_json(data: bytes | bytearray | str, most: int = LARGEST_JSON) -> Any:
    """A value from its JSON text.

    Args:
        data: the text.
        most: the largest number of bytes, or of characters.

    Raises:
        Unreadable: the text is too long, no UTF-8, no JSON, or nested too deep.
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
    """Parse a JSON object.

    Raises:
        Unreadable: the text is no JSON object.
    """
    value = parse_json(data)
    if not isinstance(value, dict):
        raise Unreadable(f"it is a JSON {type(value).__name__} and no object")
    return value


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading, without waiting for a pipe or a device of that name.

    Raises:
        OSError: the file cannot be opened.
        Unreadable: there is no regular file of that name.
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
    """Read some bytes of a file, which may be written at the same time; no bytes if there is no such file.

    Args:
        path: the path of the file.
        first: the number of the first byte.
        most: the largest number of bytes; fewer are the file's end.

    Raises:
        OSError: the file cannot be opened or read.
        Unreadable: there is no regular file of that name.
    """
    try:
        with open_file(path) as file:
            return os.pread(file.fileno(), most, first)
    except FileNotFoundError:
        return b""


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        OSError: the file cannot be opened or read.
        Unreadable: there is no regular file of that name, or it holds no JSON object.
    """
    with open_file(path) as file:
        return parse_object(file.read(LARGEST_JSON + 1))


def value_of(kind: Any, value: Any, name: str = "it") -> Any:
    """Make a value of a type from the plain values that JSON has. Numbers keep their type.

    Args:
        kind: bool, int, float (an int will do) or str; None, or anything (``Any``); a data class, whose fields are
            given by name; ``tuple``, ``list``, ``Sequence``, ``dict`` or ``Mapping`` of these; several with ``|``; or
            a mapping of names to types, for an object with all of these names and no others.
        value: the plain value.
        name: the name of the value in messages.

    Raises:
        Unreadable: the value is not of this type; the message says where.
    """
    if kind is Any:
        return value
    if type(kind) is type and kind in _PLAIN:  # first, since each step has one for each shard
        return _plain(kind, value, name)
    if isinstance(kind, Mapping) or is_dataclass(kind):
        return _fields_of(kind, value, name)
    match get_origin(kind):
        case origin if origin in (Union, UnionType):
            return _first_fitting(get_args(kind), value, name)
        case origin if origin in (tuple, list, Sequence):
            return _items_of(kind, value, name)
        case origin if origin in (dict, Mapping):
            _require(type(value) is dict, "object", value, name)
            key_kind, item_kind = get_args(kind)
            return {
                value_of(key_kind, key, f"a name in {name}"): value_of(item_kind, item, f"{name}.{short(key)}")
                for key, item in value.items()
            }
    return _plain(NoneType if kind is None else kind, value, name)


_PLAIN = (bool, int, float, str)


def _plain(kind: type, value: Any, name: str) -> Any:
    is_of_kind = isinstance(value, (int, float) if kind is float else kind)
    _require(is_of_kind and (kind is bool or type(value) is not bool), kind.__name__, value, name)
    _require(not isinstance(value, int) or abs(value) < 2**64, "number of 64 bits", value, name)
    return value


def _fields_of(kind: Any, value: Any, name: str) -> Any:
    forms = kind if isinstance(kind, Mapping) else _hints(kind)
    _require(type(value) is dict and value.keys() <= forms.keys(), f"object of {', '.join(forms)}", value, name)
    values = {field: value_of(forms[field], item, f"{name}.{field}") for field, item in value.items()}
    try:
        if isinstance(kind, type):
            return kind(**values)
    except (TypeError, ValueError) as error:  # a required field is missing, or out of range
        raise Unreadable(f"{name} is no {kind.__name__}: {error}") from error
    _require(values.keys() == forms.keys(), f"object of {', '.join(forms)}", value, name)
    return values


def _items_of(kind: Any, value: Any, name: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    _require(type(value) in (list, tuple), "list", value, name)
    if origin is tuple and parts[-1] is not Ellipsis:
        _require(len(value) == len(parts), f"list of {len(parts)}", value, name)
    else:
        parts = (parts[0],) * len(value)
    items = [value_of(part, item, f"{name}[{at}]") for at, (part, item) in enumerate(zip(parts, value, strict=True))]
    return items if origin is list else tuple(items) if origin is tuple else type(value)(items)


def _first_fitting(kinds: Sequence[Any], value: Any, name: str) -> Any:
    """The value by the first type that fits it; if none does, the error of the last type that is not None."""
    wrong: Unreadable | None = None
    for kind in kinds:
        try:
            return value_of(kind, value, name)
        except Unreadable as error:
            wrong = wrong if kind is NoneType and wrong is not None else error
    raise wrong or Unreadable(f"{name} is of no known type")


def _require(is_right: bool, kind: str, value: Any, name: str) -> None:
    if not is_right:
        raise Unreadable(f"{name} is {short(value)}, and no {kind}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def memory() -> int:
    """The bytes of memory of this host, which is the limit for the sizes of messages."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Objects that are named by a text such as ``module:name``.


IMPORT_SYSTEM = os.path.dirname(importlib.__file__)  # noqa: PTH120 (as frames have it)
"""The folder of Python's own import system, whose frames no message names."""


def imported(text: str, where: str) -> Any:
    """Import the object that a text such as ``module:name`` names.

    Args:
        text: the text.
        where: the variable or option with the text, for errors.

    Raises:
        JobError: the text has another form, or the import fails; the message says why, and where in the module.
    """
    setting = f"{where}={short(text)}"
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise JobError(f"{setting}: write module:name, as in package.module:name")
    try:
        imported_module = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a module of the user does)
        raise JobError(f"{setting} cannot be imported: {why_of(error)}") from None
    if not hasattr(imported_module, name):
        raise JobError(f"{setting}: {module} has no {name}")
    return getattr(imported_module, name)


def why_of(error: BaseException) -> str:
    """An error of foreign code in one line: its type, its message, and the line that raised it."""
    frames = [
        frame for frame in extract_tb(error.__traceback__)[1:] if not frame.filename.startswith(("<", IMPORT_SYSTEM))
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_SHOWN]}{place}"


# The user at the other end of a Unix socket, as the kernel reports it.

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a connection belongs to the user of this process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())
