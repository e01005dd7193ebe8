"""This process and others: signals, parents, open files, stacks, the command to start again, the end of a script."""

from __future__ import annotations

import atexit
import ctypes
import dis
import faulthandler
import os
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# The signals by which batch systems ask for an end beside SIGTERM, when they are told to.

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)


def ignore_notices() -> None:
    """Leave them to the launcher and the workers. A batch system sends them to every process of a job."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)


# Ending with the process that has started this one, however that ends.

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent ends; other systems know no such thing.

    Args:
        parent: the parent's process id. If it has ended already, so does this process now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


# How many files this process may have open, connections and pipes included.


def allow_open_files(wanted: int) -> int:
    """Raise the limit to so many, as far as the system lets this user, never lower it, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft


# The Python stacks of a process, which its threads write to standard error when they are asked from outside.
#
# Each thread writes its own, interrupted by a signal: it needs no lock for that, so a thread is seen that keeps the
# interpreter's lock for good. No thread reads the frames of another one, which may run meanwhile: that crashes.

STANDARD_ERROR = 2

FIRST_S = 0.25
"""How long the main thread may take: it is the one whose stack tells most, and a second one at a time is left out."""

NEXT_S = 0.005
MOST = 100


def write_stacks_on_signal() -> None:
    """Have the threads of this process, and of its forks, write their stacks when they are asked."""
    faulthandler.register(signal.SIGUSR1, STANDARD_ERROR, all_threads=False)


def request_stacks(pid: int) -> Iterator[float]:
    """Ask the threads of a process one after the other, the main thread first.

    Args:
        pid: a process that has called :func:`write_stacks_on_signal`; others end.

    Yields:
        the seconds to wait before the next thread is asked, or the process may be ended.
    """
    for thread in _threads(pid):
        _ask(pid, thread)
        yield FIRST_S if thread == pid else NEXT_S
    yield FIRST_S


def _threads(pid: int) -> list[int]:
    """The first is the main thread, which has the number of the process."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:MOST]  # noqa: PTH208 (numbers, not paths)
    except OSError:  # it has ended, or this is not Linux
        return [pid]


def _ask(pid: int, thread: int) -> None:
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "tgkill"):  # glibc has it since 2.30
        library.tgkill(pid, thread, signal.SIGUSR1)
    elif thread == pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


# The command that goes on with a job which has left with a checkpoint: as it was typed, with its run folder.


def resume_command(run_dir: Path, words: Sequence[str] | None = None) -> str:
    """The command for a shell: ``UNISONO_RUN_DIR=runs/a unisono run -n 2 train.py``.

    Args:
        run_dir: the run folder. It is not said again where the words name it.
        words: the command's words, from the interpreter on; by default those of this process.
    """
    typed = list(sys.orig_argv if words is None else words)
    if len(typed) > 1 and Path(typed[1]).name == "unisono":  # a script that pip has installed, started by its name
        is_found = shutil.which("unisono") == typed[1]
        typed = ["unisono" if is_found else typed[1], *typed[2:]]
    is_named = any(Path(word.removeprefix("--run-dir=")).absolute() == run_dir.absolute() for word in typed)
    return ("" if is_named else f"UNISONO_RUN_DIR={shlex.quote(str(run_dir))} ") + shlex.join(typed)


# The end of a process's script, and what is to be done once the script has ended well.

Act = Callable[[], None]

RETURNS = ("RETURN_VALUE", "RETURN_CONST")
"""The instructions with which a script's last line ends."""


class ScriptEnd:
    """Does what is left to do when a script has ended well: behind its last line, or in ``sys.exit`` with code 0.

    Whoever runs the script tells when that is (:meth:`reached`). Where Python itself runs it, that is found out when
    the process exits.
    """

    def __init__(self, *, is_told: bool = False) -> None:
        self.is_told = is_told
        self._acts: list[Act] = []
        self._exit: _Exit | None = None

    def then(self, act: Act) -> Act:
        """Have something done then, once, before what is to be done already; if it raises, the script has failed.

        Returns a function that forgets it.
        """
        self._acts.insert(0, act)
        if not self.is_told and self._exit is None:
            self._exit = _Exit(self.reached)
        return lambda: self._forget(act)

    def reached(self) -> None:
        """The script has ended well: do what is left to do."""
        while self._acts:
            act = self._acts[0]
            act()
            self._forget(act)

    def _forget(self, act: Act) -> None:
        if act in self._acts:
            self._acts.remove(act)
        if not self._acts and self._exit is not None:
            self._exit.close()
            self._exit = None


class _Exit:
    """Finds out at the exit of the process whether its script has ended well, and tells."""

    def __init__(self, reached: Act) -> None:
        self._reached, self._process = reached, os.getpid()
        self._frame, self._code = _frame_of_script(), -1
        self._exit = sys.exit
        # Kept, because every look at a method makes a new object, and close compares.
        self._noting = self._note
        sys.exit = self._noting
        atexit.register(self._ends)

    def close(self) -> None:
        """Look no more."""
        atexit.unregister(self._ends)
        if sys.exit == self._noting:
            sys.exit = self._exit
        self._frame = None

    def _note(self, status: Any = None, /) -> NoReturn:
        """As ``sys.exit``; the code is kept, since nothing tells it when the process exits."""
        self._code = int(not (status is None or status == 0))
        self._exit(status)

    def _ends(self) -> None:
        if os.getpid() != self._process:  # what the script has forked
            return
        if not _is_at_its_end(self._frame) and self._code != 0:
            return
        try:
            self._reached()
        except BaseException as error:  # noqa: BLE001 (Python would print it and exit with 0)
            sys.excepthook(type(error), error, error.__traceback__)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(getattr(error, "exit_code", 1))


def _frame_of_script() -> FrameType | None:
    """The outermost frame of ``__main__``, which knows to the end of the process how far it has come."""
    frame, outermost = sys._getframe(), None
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            outermost = frame
        frame = frame.f_back  # type: ignore[assignment]
    return outermost


def _is_at_its_end(frame: FrameType | None) -> bool:
    """Whether a script has come to its last line, and no exception has ended it."""
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] in RETURNS


OF_THIS_PROCESS = ScriptEnd()
"""The end of this process's script."""
