"""What a test may leave behind: nothing. The watches that find what it did.

Two kinds of watch, with one ``look`` each:

* things that *appear* (processes, threads, sockets, shared memory, temporary files): what is there after a
  test and was not there before it is a leak. Ending takes a moment, so a leftover is looked at again for a
  bounded time.
* settings that *change* (environment, working folder, signal handlers, torch's switches): compared at once.

Native threads (OpenMP, Gloo) are invisible to Python's ``threading``; those that matter hold a socket and are
found by it.
"""

import gc
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import psutil

from torch_settings import TorchSettings

PATIENCE_S = 2.0

Seen = Mapping[Hashable, str]  # what a watch saw: its identity -> words for the person who reads the failure
Settings = Mapping[str, Any]

# Each entry below is matched by a part of the name, and says why its subject may outlive a test.
ALLOWED_PROCESSES = {
    "multiprocessing.resource_tracker": "one for the life of the interpreter, ends with it",
    "multiprocessing.forkserver": "one for the life of the interpreter, ends with it",
}
ALLOWED_THREADS = {
    "pytest_timeout": "the timer of pytest-timeout, armed around the fixtures",
}
ALLOWED_TEMPORARY_FILES = {
    "pytest-of-": "pytest's own folder of tmp_path, kept for looking at after a failure",
    "pymp-": "multiprocessing's folder, one per process; a killed process cannot remove its own",
    "wandb-artifacts": "Weights & Biases' folder, one per process; a killed process cannot remove its own",
    "wandb-media": "likewise",
    "torchelastic_": "the log folder of torchrun, which never removes it",
    "torchinductor_": "torch's compile cache, made when its compiler is imported",
}
ALLOWED_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest rewrites it in every phase",
    "KMP_INIT_AT_FORK": "set by importing scikit-learn, for OpenMP",
    "KMP_DUPLICATE_LIB_OK": "set by importing scikit-learn, for OpenMP",
    "RAY_CLIENT_MODE": "set by importing Ray",
    "TORCHINDUCTOR_CACHE_DIR": "set by torch when it imports its compiler",
}


def allowed(name: str, entries: Mapping[str, str]) -> bool:
    """Whether an allow-list has an entry that is part of this name."""
    return any(entry in name for entry in entries)


def appeared(before: Seen, after: Seen) -> dict[Hashable, str]:
    """What is there now and was not there before."""
    return {key: words for key, words in after.items() if key not in before}


def changed(before: Settings, after: Settings) -> list[str]:
    """One line for each setting that differs, with both values."""
    names = sorted(before.keys() | after.keys())
    return [
        f"{name}: was {_short(before, name)}, now {_short(after, name)}"
        for name in names
        if (name in before) != (name in after) or before.get(name) != after.get(name)
    ]


def _short(settings: Settings, name: str) -> str:
    if name not in settings:
        return "not set"
    text = repr(settings[name])
    return text if len(text) <= 200 else text[:197] + "..."


class Watch(Protocol):
    """Something that can appear and should be gone again."""

    @property
    def noun(self) -> str:
        """What one of it is called."""

    def look(self) -> Seen:
        """Everything of this kind that is there now."""

    def ours(self, leftover: Seen) -> Seen:
        """The part of what appeared that this run is to blame for."""


class Setting(Protocol):
    """Something that can be changed and should be as before."""

    @property
    def noun(self) -> str:
        """What one of it is called."""

    def look(self) -> Settings:
        """The values now."""

    def restore(self, before: Settings) -> None:
        """Put the values back."""


# --- things that appear


@dataclass(frozen=True)
class Processes:
    """Descendants of this process, and processes that carry this run's mark although their parent is gone.

    A worker lives in a session of its own; when its launcher dies it is nobody's descendant any more. But it
    has the environment that it was started with, so a variable with a value of its own tells whose it is.
    """

    mark: tuple[str, str] | None = None
    noun: str = "process"

    def look(self) -> Seen:
        listed = everybody()
        ours = descendants(os.getpid(), listed) | {each for each in listed if self._is_marked(each)}
        found = [(each.pid, describe_process(each.pid)) for each in sorted(ours)]
        return {pid: words for pid, words in found if words and not allowed(words, ALLOWED_PROCESSES)}

    def ours(self, leftover: Seen) -> Seen:
        return leftover

    def _is_marked(self, process: "Listed") -> bool:
        if self.mark is None or process.pid == os.getpid():
            return False
        return os.fsencode("=".join(self.mark)) in variables_of(process)


KERNEL_THREAD = 0x00200000
"""A flag of such processes in ``/proc/PID/stat``."""


class Listed(NamedTuple):
    """A process, by what changes little as long as it lives. One that has ended shows its variables no more."""

    pid: int
    start: float
    parent: int
    has_ended: bool


def everybody() -> list[Listed]:
    """All processes there are. Each test asks twice; psutil takes five times as long."""
    if sys.platform != "linux":
        return [
            Listed(each.pid, each.create_time(), each.ppid(), each.status() == psutil.STATUS_ZOMBIE)
            for each in psutil.process_iter()
        ]
    found, names = [], {name for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208 (names, not paths)
    _kernel_threads.intersection_update(names)  # the number of one that is gone is given to others
    for name in names - _kernel_threads:
        with suppress(OSError):  # gone meanwhile
            fields = read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if int(fields[6]) & KERNEL_THREAD:
                _kernel_threads.add(name)
            else:
                found.append(Listed(int(name), float(fields[19]), int(fields[1]), fields[0] == b"Z"))
    return found


_kernel_threads: set[str] = set()
"""Those that were there at the last look: most of all processes, and none of ours."""


def read(path: str) -> bytes:
    """A file of ``/proc``, which is short."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (in a hundredth of a millisecond)
        return file.readall() or b""


def descendants(pid: int, listed: Sequence[Listed]) -> set[Listed]:
    """Of one of them."""
    children = defaultdict[int, list[Listed]](list)
    for each in listed:
        children[each.parent].append(each)
    found, new = set[Listed](), children[pid]
    while new:
        found |= set(new)
        new = [child for each in new for child in children[each.pid] if child not in found]
    return found


def variables_of(process: Listed) -> frozenset[bytes]:
    """What a process was started with; nothing once it has ended, or if it is another user's."""
    if process not in _variables:
        with suppress(psutil.Error, OSError):
            until = time.monotonic() + STARTING_S
            while not (found := _read_variables(process.pid)) and time.monotonic() < until:
                if psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE:
                    return found
                time.sleep(0.001)  # it is just being started
            _variables[process] = found
    return _variables.get(process, frozenset())


STARTING_S = 0.1
"""How long a program may take from its start to its variables."""

_variables: dict[Listed, frozenset[bytes]] = {}


def _read_variables(pid: int) -> frozenset[bytes]:
    if sys.platform == "linux":
        return frozenset(read(f"/proc/{pid}/environ").split(b"\0")) - {b""}
    return frozenset(os.fsencode(f"{name}={value}") for name, value in psutil.Process(pid).environ().items())


def describe_process(pid: int) -> str:
    """A process in words; empty when it has ended meanwhile."""
    unwaited = f"{pid} (ended, but nobody waited for it)"
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return unwaited
        alone = ", in a session of its own" if os.getsid(pid) == pid else ""
        return f"{pid} ({' '.join(process.cmdline())[:200]}){alone}"
    except psutil.ZombieProcess:
        return unwaited
    except (psutil.NoSuchProcess, ProcessLookupError):
        return ""


def kill(leftover: Seen) -> None:
    """End leaked processes at once, so that the next test does not suffer from them."""
    leaked = []
    for pid in leftover:
        with suppress(psutil.NoSuchProcess):
            leaked.append(psutil.Process(cast("int", pid)))
            leaked[-1].kill()
    psutil.wait_procs(leaked, timeout=PATIENCE_S)


@dataclass(frozen=True)
class Threads:
    """Python's threads, daemons too."""

    noun: str = "thread"

    def look(self) -> Seen:
        return {
            thread: f"{thread.name!r}{' (daemon)' if thread.daemon else ''}"
            for thread in threading.enumerate()
            # A native thread that once called Python keeps its dummy entry for good; it was not started here.
            if not isinstance(thread, threading._DummyThread) and not allowed(thread.name, ALLOWED_THREADS)
        }

    def ours(self, leftover: Seen) -> Seen:
        return leftover


@dataclass(frozen=True)
class Sockets:
    """Open sockets of this process, by their inodes (descriptors are reused)."""

    noun: str = "socket"

    def look(self) -> Seen:
        return {inode: f"on descriptor {descriptor}" for descriptor, inode in _open_sockets()}

    def ours(self, leftover: Seen) -> Seen:
        if not leftover:
            return leftover
        addresses = {entry.fd: describe_connection(entry) for entry in psutil.Process().net_connections(kind="all")}
        return {
            inode: f"{addresses.get(descriptor, 'of unknown kind')}, descriptor {descriptor}"
            for descriptor, inode in _open_sockets()
            if inode in leftover
        }


def _open_sockets() -> list[tuple[int, int]]:
    found = []
    for descriptor in sorted(int(entry.name) for entry in Path("/dev/fd").iterdir()):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found.append((descriptor, status.st_ino))
    return found


def describe_connection(entry: Any) -> str:
    """A connection of psutil in words: ``127.0.0.1:4711 -> 127.0.0.1:80 ESTABLISHED``."""
    ends = [end for end in (_address(entry.laddr), _address(entry.raddr)) if end]
    state = "" if entry.status in ("NONE", "") else f" {entry.status}"
    return (" -> ".join(ends) or "not bound") + state


def _address(end: Any) -> str:
    return end if isinstance(end, str) else ":".join(str(part) for part in end)


def mapped_by(pids: Iterable[int]) -> str:
    """The memory maps of these processes, as one text to search for a path in."""
    maps = []
    for pid in pids:
        with suppress(OSError):  # gone meanwhile, or somebody else's
            maps.append(Path(f"/proc/{pid}/maps").read_text(errors="replace"))
    return "\n".join(maps)


@dataclass(frozen=True)
class SharedMemory:
    """Segments in /dev/shm with a name that torch, multiprocessing or Unisono gives.

    The folder belongs to the whole machine, so a new entry that a process outside this run has mapped is not
    ours.
    """

    folder: Path = Path("/dev/shm")  # noqa: S108 (where the system keeps shared memory, not a temporary file)
    prefixes: tuple[str, ...] = ("unisono", "torch_", "psm_", "sem.", "nccl-")
    mark: tuple[str, str] | None = None
    noun: str = "shared memory"
    maps: Callable[[Iterable[int]], str] = mapped_by

    def look(self) -> Seen:
        if not self.folder.is_dir():
            return {}
        return {
            entry.name: str(entry)
            for entry in self.folder.iterdir()
            if entry.name.startswith(self.prefixes) and _owned(entry)
        }

    def ours(self, leftover: Seen) -> Seen:
        if not leftover:
            return leftover
        family = {os.getpid(), *Processes(self.mark).look()}
        mapped = self.maps(pid for pid in psutil.pids() if pid not in family)
        return {name: path for name, path in leftover.items() if path not in mapped}


def _owned(entry: Path) -> bool:
    with suppress(FileNotFoundError):
        return entry.stat().st_uid == os.getuid()
    return False


@dataclass(frozen=True)
class TemporaryFiles:
    """Entries of the folder for temporary files. The run has one of its own, so whatever is in it is ours."""

    noun: str = "temporary file"

    def look(self) -> Seen:
        folder = Path(tempfile.gettempdir())
        if not folder.is_dir():
            return {}
        return {
            entry.name: str(entry) for entry in folder.iterdir() if not allowed(entry.name, ALLOWED_TEMPORARY_FILES)
        }

    def ours(self, leftover: Seen) -> Seen:
        return leftover


# --- settings that change


@dataclass(frozen=True)
class Environment:
    """The environment's variables."""

    noun: str = "environment variable"

    def look(self) -> Settings:
        return {name: value for name, value in os.environ.items() if name not in ALLOWED_VARIABLES}

    def restore(self, before: Settings) -> None:
        for name in [name for name in os.environ if name not in before and name not in ALLOWED_VARIABLES]:
            del os.environ[name]
        os.environ.update(before)


@dataclass(frozen=True)
class WorkingFolder:
    """The current directory."""

    noun: str = "working folder"

    def look(self) -> Settings:
        with suppress(FileNotFoundError):
            return {"path": str(Path.cwd())}
        return {"path": "a folder that is gone"}

    def restore(self, before: Settings) -> None:
        os.chdir(before["path"])


@dataclass(frozen=True)
class SignalHandlers:
    """What Python does on the signals that the launcher and its workers handle."""

    noun: str = "signal handler"
    signals: tuple[signal.Signals, ...] = (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGCHLD,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )

    def look(self) -> Settings:
        return {number.name: signal.getsignal(number) for number in self.signals}

    def restore(self, before: Settings) -> None:
        for number in self.signals:
            signal.signal(number, before[number.name])


# --- the whole


@dataclass(frozen=True)
class Leaks:
    """What a test, or the whole run, left behind."""

    culprit: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join((f"{self.culprit} left behind:", *self.lines))


@dataclass(frozen=True)
class Guard:
    """All the watches, and what they saw at one moment."""

    watches: tuple[Watch, ...]
    settings: tuple[Setting, ...]
    seen: tuple[Seen, ...]
    values: tuple[Settings, ...]

    @classmethod
    def now(cls, mark: tuple[str, str] | None = None) -> "Guard":
        """Look at everything before a test."""
        watches = (Processes(mark), Threads(), Sockets(), SharedMemory(mark=mark), TemporaryFiles())
        settings = (Environment(), WorkingFolder(), SignalHandlers(), TorchSettings())
        return cls(
            watches,
            settings,
            tuple(watch.look() for watch in watches),
            tuple(each.look() for each in settings),
        )

    def leaks(self, culprit: str) -> Leaks:
        """Look again after it: name what is left, then end leaked processes and put settings back."""
        lines = []
        for watch, seen in zip(self.watches, self.seen, strict=True):
            leftover = left_after(watch, seen, PATIENCE_S)
            lines += [f"{watch.noun} {words}" for words in leftover.values()]
            if isinstance(watch, Processes):
                kill(leftover)
        for setting, values in zip(self.settings, self.values, strict=True):
            differences = changed(values, setting.look())
            lines += [f"{setting.noun} {words}" for words in differences]
            if differences:
                setting.restore(values)
        return Leaks(culprit, tuple(lines))


def left_after(watch: Watch, before: Seen, patience_s: float) -> Seen:
    """What appeared and is ours, once ending has had its time. Waits only while something is still there."""
    leftover = watch.ours(appeared(before, watch.look()))
    if leftover:
        gc.collect()  # a traceback may hold what is ended already
    until = time.monotonic() + patience_s
    while leftover and time.monotonic() < until:
        time.sleep(0.02)
        leftover = watch.ours(appeared(before, watch.look()))
    return leftover
