"""The Python stacks of a process, which its threads write to standard error when they are asked from outside.

Each thread writes its own, interrupted by a signal: it needs no lock for that, so a thread is seen that keeps the
interpreter's lock for good. No thread reads the frames of another one, which may run meanwhile: that crashes processes.
"""

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

STANDARD_ERROR = 2

FIRST_S = 0.25
"""How long the main thread may take: it is the one whose stack tells most, and a second one at a time is left out."""

NEXT_S = 0.005
MOST = 100


def write_when_asked() -> None:
    """Have the threads of this process, and of its forks, write their stacks when they are asked."""
    faulthandler.register(signal.SIGUSR1, STANDARD_ERROR, all_threads=False)


def ask_for_stacks(pid: int) -> Iterator[float]:
    """Ask the threads of a process one after the other, the main thread first.

    Args:
        pid: a process that has called :func:`write_when_asked`; others end.

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
