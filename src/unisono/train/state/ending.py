"""How a run ends on this worker: once, whoever wants it."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

from unisono.errors import Dismissed, JobError


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
