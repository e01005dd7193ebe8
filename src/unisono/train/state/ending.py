"""The end of a run on this worker: who asks for it, what all workers have agreed on, and that it happens once."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, NoReturn

from unisono.errors import Dismissed, JobError


class LeaveRequest:
    """Notes a SIGTERM instead of dying of it; a second one ends the process at once.

    Only the main thread can listen to signals; elsewhere nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def close(self) -> None:
        """Give the signal back to whoever had it."""
        if self._listens and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._below())
        self._listens = False

    def _below(self) -> Any:
        """Whoever had the signal before, and still wants it: a run that was opened before may be closed by now."""
        below = self._before
        while isinstance(run := getattr(below, "__self__", None), LeaveRequest) and not run._listens:
            below = run._before
        return below

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._listens:  # somebody has put it back
            signal.signal(number, self._below())
            os.kill(os.getpid(), number)
            return
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True


class Requests:
    """Set in a collective call, so that all workers have agreed on them, or none.

    Attributes:
        leave: a worker was asked to leave, and the job with it.
        regroup: a new generation is due.
    """

    def __init__(self) -> None:
        self.leave = self.regroup = False

    def note(self, *, leave: bool = False, regroup: bool = False) -> None:
        """Workers want this, too. In a change."""
        self.leave, self.regroup = self.leave or leave, self.regroup or regroup


class Ending:
    """Closes all that a run has opened, the newest first.

    Args:
        opened: what is to be closed.

    Attributes:
        is_closed: whether the run is over on this worker.
    """

    def __init__(self, opened: ExitStack) -> None:
        self.is_closed = False
        self._opened = opened
        self._farewell: Dismissed | None = None

    def also(self, close: Callable[[], None]) -> None:
        """Close this, too, before what is there already."""
        self._opened.callback(close)

    def require_open(self) -> None:
        """Refuse to go on when all is over.

        Raises:
            Dismissed: the others go on without this worker; its script has caught that.
            JobError: the run was closed.
        """
        if self._farewell is not None:
            raise self._farewell
        if self.is_closed:
            raise JobError("this run has ended: start another with unisono.init")

    def leave(self, farewell: Dismissed) -> NoReturn:
        """The others go on without this worker, or the job does later."""
        self._farewell = farewell
        self.close()
        raise farewell

    def close(self) -> None:
        """Close everything, once."""
        if self.is_closed:
            return
        self.is_closed = True
        atexit.unregister(self.close)
        self._opened.close()
