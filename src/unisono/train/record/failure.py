"""A run that ends with an error says so in its run folder."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from unisono.errors import WorkerLost
from unisono.train.record.results import Results


class FailureNote:
    """Writes ``result.json`` when the script ends with an error that began on this worker."""

    def __init__(self, results: Results) -> None:
        self._results = results
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
            self._results.failed({"type": kind.__name__, "message": str(error), "traceback": text})
        self._before(kind, error, trace)
