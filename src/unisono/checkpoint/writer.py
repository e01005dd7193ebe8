"""The right to write into a run folder: only a worker of the newest start and the newest generation has it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from unisono.errors import JobError, Superseded, Unreadable
from unisono.host.tracebacks import warn
from unisono.received import open_file, parse_json

# The origin of a process: two processes of one origin can find each other by their process ids.


@cache
def origin() -> str:
    """16 hex digits that identify the present boot of this host's kernel, and this process's namespace of process ids.

    Hostname and process id do not suffice: two containers may have the same hostname, and use the same ids.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return mark_of(kernel, Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:  # without /proc only the host's name is left
        return mark_of(socket.gethostname(), 0)


def mark_of(kernel: str, namespace: int) -> str:
    """A hash of the id of a kernel's boot and of a namespace."""
    return sha256(f"{kernel} {namespace}".encode()).hexdigest()[:16]


# The writer of a run folder: a worker of the newest start and the newest generation, and none of earlier ones.

WRITER = "writer.json"
"""The file in the run folder that names its writer."""

LOOK_S = 0.05
PLACING_S = 2.0
"""The longest wait for a process that puts a file in place: it may have been stopped."""

_LONGEST = 4096


@dataclass(frozen=True, slots=True, order=True)
class WriterOrder:
    """A worker's place in the order of writers: a later one replaces an earlier one.

    Attributes:
        term: the start of the job in this run folder.
        generation: the number of the workers' generation.
    """

    term: int
    generation: int


class Writer:
    """A worker's right to write into a run folder.

    A host that is cut off trains on for a while, and the job may meanwhile go on elsewhere from its newest checkpoint.
    A writer first puts its turn into a file of the folder, where a worker of an earlier turn that comes back finds it.
    A worker that has received nothing from the coordinator for too long writes nothing, even without such a file.

    Args:
        away: why the job may go on without this worker; empty if it cannot.
        placing_s: the longest wait for another process that is putting a file in place, in seconds.

    Attributes:
        is_superseded: whether a worker of a later turn was found to write there.
    """

    def __init__(
        self,
        folder: Path,
        turn: Callable[[], WriterOrder],
        away: Callable[[], str] = lambda: "",
        placing_s: float = PLACING_S,
    ) -> None:
        self._path, self._turn, self._away, self._placing_s = folder / WRITER, turn, away, placing_s
        # The turn that this worker claimed, and the state of the file then; see _file_state.
        self._claimed: tuple[WriterOrder, tuple[int, int, int]] | None = None
        self._is_away = False
        self.is_superseded = False

    @property
    def about(self) -> dict[str, int]:
        """The present turn, as fields of the files that are written."""
        return asdict(self._turn())

    def obstacle(self) -> str:
        """Why nothing may be written now; empty if it may.

        Raises:
            Superseded: workers of a later turn write there.
        """
        why = self._away()
        if why and not self._is_away:
            warn(f"{why}: no checkpoint, no result and no metrics are written until it is heard of again")
        self._is_away = bool(why)
        turn = self._turn()
        if self._claimed is None or self._claimed != (turn, self._file_state()):
            with suppress(OSError):  # then nothing else can be written either, and that failure is reported
                self._claim(turn, writes=not why)
        return why

    def is_ours(self) -> bool:
        """Whether this worker may write, as far as it knows. From any thread: it claims and warns of nothing."""
        if self._away() or self.is_superseded:
            return False
        try:
            with self._opened() as descriptor:
                return _read(descriptor)[0] <= self._turn()
        except OSError:
            return True

    def wait(self, timeout_s: float) -> str:
        """Wait until this worker may write; returns why it still may not, empty if it may.

        Raises:
            Superseded: workers of a later turn write there.
        """
        deadline = time.monotonic() + timeout_s
        while (why := self.obstacle()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return why

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Within the context, files are put in place before any later start of the job writes.

        Only the start counts, not the generation: a worker that leaves may finish a checkpoint while the others go on,
        since theirs of that step would have the same bits.

        Raises:
            Superseded: a later start writes already.
        """
        with self._opened() as descriptor:
            with suppress(OSError):  # not every network file system has locks
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            theirs, holder = _read(descriptor)
            if theirs.term > self._turn().term:
                raise self._superseded(theirs, holder)
            yield

    def _claim(self, mine: WriterOrder, *, writes: bool) -> None:
        with self._opened() as descriptor:
            _lock(descriptor, self._placing_s)
            theirs, holder = _read(descriptor)
            if theirs > mine:
                raise self._superseded(theirs, holder)
            if not writes:
                return
            if theirs < mine:
                _write(descriptor, {**asdict(mine), "host": socket.gethostname(), "pid": os.getpid()})
            self._claimed = mine, self._file_state()

    @contextmanager
    def _opened(self) -> Iterator[int]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _file_state(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return 0, 0, 0
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _superseded(self, theirs: WriterOrder, holder: str) -> Superseded:
        self.is_superseded, mine = True, self._turn()
        return Superseded(
            f"{self._path.parent} is written by {holder} now, in generation {theirs.generation} of start {theirs.term} "
            f"of the job; this worker, of generation {mine.generation} of start {mine.term}, was cut off from it, and "
            f"writes there no more"
        )


def _lock(descriptor: int, patience_s: float) -> None:
    """Lock the file against processes that put files in place; give up if they take too long, or locks do not work."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_S)
        except OSError:
            return
        else:
            return


def _read(descriptor: int) -> tuple[WriterOrder, str]:
    """Read the newest order of writers, and a description of its holder."""
    try:
        about: Any = parse_json(os.pread(descriptor, _LONGEST, 0))
    except Unreadable:
        about = None
    match about:
        case {"term": int(term), "generation": int(generation), "host": host, "pid": pid}:
            return WriterOrder(term, generation), f"process {str(pid)[:20]} on host {str(host)[:100]}"
    return WriterOrder(0, 0), "nobody"


def _write(descriptor: int, about: dict[str, Any]) -> None:
    text = json.dumps(about).encode() + b"\n"
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))


LOCK = "lock"
"""The file in the run folder that names the process which holds it, or has held it last."""

_open: weakref.WeakSet[Hold] = weakref.WeakSet()


class Hold:
    """Keeps other processes from starting a job in a run folder, until it is released or this process ends.

    The file stays. Each hold has a term, one more than the one before it in this folder. Where a file system has no
    locks, no process is kept out. A process that starts again in its own folder takes it over from its earlier run.

    Args:
        folder: the absolute path of the run folder, which exists.

    Attributes:
        term: 1, 2, 3 …

    Raises:
        JobError: another process holds it; says which, and since when. Nothing was changed.
        OSError: it cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        for earlier in [hold for hold in _open if hold.folder == folder]:
            earlier.release()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(folder / LOCK, flags, 0o666)  # the umask decides whether a group shares the folder
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = describe_holder(folder)
                self._close()
                raise JobError(
                    f"the run folder {folder} is in use: {holder}. Wait until that job has ended, or name another "
                    f"folder with --run-dir or run_dir="
                ) from error
        self.term = newest_term(folder) + 1
        since = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"term": self.term, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
        _write(self._descriptor, about)
        os.fsync(self._descriptor)
        _open.add(self)

    def release(self) -> None:
        """Release the folder for another start."""
        if self._close.alive:
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close the file without unlocking it, as each fork does: the hold must end with the process that has it."""
        _open.discard(self)
        self._close()


def newest_term(folder: Path) -> int:
    """The term of the newest start in a run folder; 0 before the first.

    A person may have removed the lock, or copied the folder without it: so the term in the writer's file counts, too.
    """
    terms = (_read_about(folder / name).get("term") for name in (LOCK, WRITER))
    return max(0, *(term if isinstance(term, int) else 0 for term in terms))


def describe_holder(folder: Path) -> str:
    """Describe in words the process that has held a run folder last."""
    about = _read_about(folder / LOCK)
    pid, host, since = (str(about.get(name, "?"))[:100] for name in ("pid", "host", "since"))
    return f"process {pid} on host {host} has held it since {since}"


def _read_about(path: Path) -> dict[str, Any]:
    try:
        with open_file(path) as file:
            about = parse_json(file.read(_LONGEST))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _forget_all() -> None:
    for hold in list(_open):
        hold.forget()


os.register_at_fork(after_in_child=_forget_all)  # in loader processes, say
