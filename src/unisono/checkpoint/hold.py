"""A run folder has one start of a job at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import weakref
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.checkpoint.writer import WRITER
from unisono.errors import JobError
from unisono.received import open_file, parse_json

LOCK = "lock"
"""In the run folder: who holds it, or has held it last."""

_LONGEST = 4096
_open: weakref.WeakSet[Hold] = weakref.WeakSet()


class Hold:
    """Keeps others from starting a job in a run folder, until this is released or the process has ended, however.

    The file stays. Each hold has a term, one more than the one before it in this folder. Where a file system has no
    locks, nobody is kept out. A process that begins again in its own folder takes it from its earlier run.

    Args:
        folder: the run folder; it exists. An absolute path.

    Attributes:
        folder: the run folder.
        term: 1, 2, 3 …

    Raises:
        JobError: another process holds it; says which, and since when. Nothing was changed.
        OSError: it cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        for mine in [hold for hold in _open if hold.folder == folder]:
            mine.release()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(folder / LOCK, flags, 0o666)  # what the umask leaves: a group may share it
        self._end = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                said = who_holds(folder)
                self._end()
                raise JobError(
                    f"the run folder {folder} is in use: {said}. Wait until that job has ended, or name another folder "
                    f"with --run-dir or run_dir="
                ) from error
        self.term = newest_term(folder) + 1
        self._write()
        _open.add(self)

    def release(self) -> None:
        """Let another start have the folder."""
        if self._end.alive:
            with suppress(OSError):  # there are no locks here
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """In a fork of the process that holds the folder: it must not be held when that one has ended."""
        _open.discard(self)
        self._end()

    def _write(self) -> None:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"term": self.term, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
        text = json.dumps(about).encode() + b"\n"
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
        os.fsync(self._descriptor)


def newest_term(folder: Path) -> int:
    """The term of the newest start in a run folder; 0 before the first.

    Somebody may have removed the lock, or copied the folder without it: whoever writes there has noted its term, too.
    """
    found = (_read(folder / name).get("term") for name in (LOCK, WRITER))
    return max(0, *(term if isinstance(term, int) else 0 for term in found))


def who_holds(folder: Path) -> str:
    """Who has held a run folder last, for people."""
    found = _read(folder / LOCK)
    pid, host, since = (str(found.get(name, "?"))[:100] for name in ("pid", "host", "since"))
    return f"process {pid} on host {host} has held it since {since}"


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_file(path) as file:
            found = parse_json(file.read(_LONGEST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _forked() -> None:
    for hold in list(_open):  # a loader process, say
        hold.forget()


os.register_at_fork(after_in_child=_forked)
