"""The coordinator's lines in the run folder's journal, which the workers write as well."""

import errno
import fcntl
import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.errors import UnisonoWarning


class Journal:
    """Appends events to a file of JSON lines, each with the time it happened.

    What cannot be written is warned of and left out: no job ends for want of a line in its journal.

    Args:
        path: of the file; it is made with the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append an event, at once and whole."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **fields}, allow_nan=False).encode() + b"\n"
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                _append(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            warnings.warn(f"{self._path} is incomplete: {error}. The job goes on", UnisonoWarning, stacklevel=2)


def _append(descriptor: int, line: bytes) -> None:
    with suppress(OSError):  # not every network file system has locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the descriptor is closed
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line
    if os.write(descriptor, line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
