"""A run that ends with an error says so in its run folder."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from unisono.errors import WorkerLost

if TYPE_CHECKING:
    from unisono.train.run import Run


class FailureNote:
    """Writes ``result.json`` when the script ends with an error that began on this worker."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = sys.excepthook
        # Kept, because every look at a method makes a new object, and close compares.
        self._hook = self._note
        sys.excepthook = self._hook

    def close(self) -> None:
        """Give the hook back, unless somebody else has taken it meanwhile."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._before

    def _note(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, WorkerLost | KeyboardInterrupt):
            text = "".join(traceback.format_exception(kind, error, trace))
            about = {"rank": self._run.rank, "type": kind.__name__, "message": str(error), "traceback": text}
            self._run.write_failure(about)
        self._before(kind, error, trace)
