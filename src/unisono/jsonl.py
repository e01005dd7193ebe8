"""Files of JSON lines, to which several processes append."""

import errno
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unisono.received import parse_json


def open_lines(path: Path) -> int:
    """A descriptor to append to a file with; the file is made if it is not there.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def append_line(descriptor: int, value: Mapping[str, Any]) -> None:
    """Write a line with one system call, on a line of its own even if the one before was cut off.

    Raises:
        OSError: it could not be written, or not whole.
    """
    line = to_json(value)
    with _locked(descriptor):  # or what another one is just writing would look cut off
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file that somebody may be writing just now; none if there is no such file.

    Lines that are damaged or not yet whole are left out.
    """
    return [value for line in _lines(path) if (value := _object(line)) is not None]


def damaged_lines(path: Path) -> list[int]:
    """The numbers, from 1, of a file's lines that are no objects; a last one that is not yet whole is none of them."""
    lines = _lines(path)
    return [n for n, line in enumerate(lines, 1) if line.endswith(b"\n") and line.strip() and _object(line) is None]


def to_json(value: Any, indent: int | None = None) -> bytes:
    """A value as JSON with a newline behind it. NaN and infinities, which JSON does not have, become null."""
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=indent, allow_nan=False)
    return (text + "\n").encode()


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _object(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):
        value = parse_json(line) if line.endswith(b"\n") else None
        if isinstance(value, dict):
            return value
    return None


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    with suppress(OSError):  # not every network file system has locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
