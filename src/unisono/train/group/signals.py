"""SIGTERM means: leave at the next step boundary."""

import os
import signal
import threading
from types import FrameType
from typing import Any


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
            signal.signal(signal.SIGTERM, self._before)
        self._listens = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
