"""This process and others: signals, parents, open files, stacks, the command that resumes a job, a script's end."""

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

# The signals other than SIGTERM by which batch systems can be told to ask a job to end.

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)


def ignore_notices() -> None:
    """Ignore these signals in this process: batch systems send them to all processes of a job, not to workers alone."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)


# The end of this process when its parent ends.

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent ends; other systems cannot.

    Args:
        parent: the parent's process id. If the parent has ended already, this process is killed at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os.kill(os.getpid(), signal.SIGKILL)


# The limit of open files of this process, connections and pipes included.


def allow_open_files(count: int) -> int:
    """Raise the limit of open files to a number as far as possible. Returns the number, or the limit if it is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return allowed
    return soft


# The Python stacks of a process, which its threads write to standard error on a signal.
#
# Each thread writes its own stack, and needs no lock for that: so even a thread that never releases the interpreter's
# lock writes it. No thread reads the frames of another one, which may run meanwhile: that crashes.

STANDARD_ERROR = 2

FIRST_S = 0.25
"""The seconds for the main thread, whose stack tells most: a thread asked while another one writes is left out."""

NEXT_S = 0.005
MOST = 100


def write_stacks_on_signal() -> None:
    """Have the threads of this process, and of its forks, write their stacks on SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, STANDARD_ERROR, all_threads=False)


def request_stacks(pid: int) -> Iterator[float]:
    """Ask the threads of a process for their stacks, one after the other, the main thread first.

    Args:
        pid: a process that has called :func:`write_stacks_on_signal`; the signal ends any other.

    Yields:
        the seconds to wait before the next thread is asked, or the process may be ended.
    """
    for thread in _threads(pid):
        _signal_thread(pid, thread)
        yield FIRST_S if thread == pid else NEXT_S
    yield FIRST_S


def _threads(pid: int) -> list[int]:
    """The threads of a process; the first is the main thread, which has the process's number."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:MOST]  # noqa: PTH208 (numbers, not paths)
    except OSError:  # it has ended, or this is not Linux
        return [pid]


def _signal_thread(pid: int, thread: int) -> None:
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "tgkill"):  # glibc has it since 2.30
        library.tgkill(pid, thread, signal.SIGUSR1)
    elif thread == pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


# The command that resumes a job from its checkpoint: as it was typed, with the run folder.


def resume_command(run_dir: Path, words: Sequence[str] | None = None) -> str:
    """The command for a shell: ``UNISONO_RUN_DIR=runs/a unisono run -n 2 train.py``.

    Args:
        run_dir: the run folder. It is not added if the words name it.
        words: the command's words, from the interpreter on; by default those of this process.
    """
    typed = list(sys.orig_argv if words is None else words)
    if len(typed) > 1 and Path(typed[1]).name == "unisono":  # pip's script: Python was started by its first line
        is_found = shutil.which("unisono") == typed[1]
        typed = ["unisono" if is_found else typed[1], *typed[2:]]
    is_named = any(Path(word.removeprefix("--run-dir=")).absolute() == run_dir.absolute() for word in typed)
    return ("" if is_named else f"UNISONO_RUN_DIR={shlex.quote(str(run_dir))} ") + shlex.join(typed)


# The end of a process's script, and functions that are called once the script has ended without an error.

Act = Callable[[], None]

RETURNS = ("RETURN_VALUE", "RETURN_CONST")
"""The instructions with which a script's last line ends."""


class ScriptEnd:
    """Calls functions when a script has ended well: after its last line, or by ``sys.exit`` with code 0.

    A launcher that runs the script calls :meth:`reached` then, and sets ``is_told``. If Python itself runs the script,
    the exit of the process shows how it ended.
    """

    def __init__(self, *, is_told: bool = False) -> None:
        self.is_told = is_told
        self._acts: list[Act] = []
        self._exit: _Exit | None = None

    def then(self, act: Act) -> Act:
        """Add a function to call once, before those that were added earlier. If it raises, the script has failed.

        Returns a function that removes it.
        """
        self._acts.insert(0, act)
        if not self.is_told and self._exit is None:
            self._exit = _Exit(self.reached)
        return lambda: self._forget(act)

    def reached(self) -> None:
        """Call the functions, since the script has ended well."""
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
    """Finds out at the exit of the process whether its script has ended well, and calls a function if so."""

    def __init__(self, reached: Act) -> None:
        self._reached, self._process = reached, os.getpid()
        self._frame, self._code = _frame_of_script(), -1
        self._exit = sys.exit
        # Stored, because each access to a method makes a new object.
        self._replacement = self._record_exit
        sys.exit = self._replacement
        atexit.register(self._ends)

    def close(self) -> None:
        """Undo the changes to ``sys.exit`` and ``atexit``."""
        atexit.unregister(self._ends)
        if sys.exit == self._replacement:
            sys.exit = self._exit
        self._frame = None

    def _record_exit(self, status: Any = None, /) -> NoReturn:
        """As ``sys.exit``; the code is recorded, since functions of ``atexit`` cannot find it out."""
        self._code = int(not (status is None or status == 0))
        self._exit(status)

    def _ends(self) -> None:
        if os.getpid() != self._process:  # a process that the script has forked
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
    """The outermost frame of ``__main__``, which shows until the end of the process how far the script has come."""
    frame, outermost = sys._getframe(), None
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            outermost = frame
        frame = frame.f_back  # type: ignore[assignment]
    return outermost


def _is_at_its_end(frame: FrameType | None) -> bool:
    """Whether a script has returned from its last line, without an exception."""
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] in RETURNS


OF_THIS_PROCESS = ScriptEnd()
"""The end of this process's script."""
