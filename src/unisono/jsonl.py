"""Files of JSON lines, to which several processes append."""

import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unisono.errors import Unreadable
from unisono.received import memory, open_file, parse_json


def open_lines(path: Path, mode: int = 0o666, flags: int = 0) -> int:
    """A descriptor with which to append to a file; a missing file is made.

    Args:
        path: the path of the file.
        mode: the permissions of a new file, as far as the umask leaves them.
        flags: further flags of ``os.open``.

    Raises:
        OSError: the file cannot be opened, or is no regular file, or a symbolic link, which could lead anywhere.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | flags, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe would take lines until it is full, and then wait
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return descriptor


def append_line(descriptor: int, value: Mapping[str, Any]) -> None:
    """Append a line, as a line of its own even if the one before was cut off.

    Raises:
        OSError: the line could not be written, or not as a whole.
    """
    line = to_json(value)
    with _locked(descriptor):  # else a line that another process is just writing would look cut off
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        _write_whole(descriptor, line)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file, which another process may be writing; none if there is no such file.

    Lines that are damaged or not yet whole are left out.

    Raises:
        OSError: the file cannot be read.
        Unreadable: it is no regular file, or too large.
    """
    return [value for line in raw_lines(path) if (value := _object(line)) is not None]


def damaged_lines(path: Path) -> list[int]:
    """The numbers, from 1, of a file's lines that are no objects, without a last line that is not yet whole."""
    lines = raw_lines(path)
    return [n for n, line in enumerate(lines, 1) if line.endswith(b"\n") and line.strip() and _object(line) is None]


def to_json(value: Any, indent: int | None = None) -> bytes:
    """A value as JSON with a newline behind it. NaN and infinities, which JSON does not have, become null."""
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=indent, allow_nan=False)
    return (text + "\n").encode()


def raw_lines(path: Path) -> list[bytes]:
    """The lines of a file with their ends, damaged ones too; raises as :func:`read_lines` does."""
    try:
        with open_file(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > memory() // 4:
                raise Unreadable(f"{path} has {size} bytes: too many for this host's memory")
            return file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _write_whole(descriptor: int, data: bytes) -> None:
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
