"""A run that ends with an error says so in its run folder."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from unisono.errors import WorkerLost

if TYPE_CHECKING:
    from unisono.train.run import Run


def note_failures(run: Run) -> None:
    """Write ``result.json`` when the script ends with an error that began on this worker."""
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, WorkerLost | KeyboardInterrupt):
            text = "".join(traceback.format_exception(kind, error, trace))
            run.write_failure({"rank": run.rank, "type": kind.__name__, "message": str(error), "traceback": text})
        before(kind, error, trace)

    sys.excepthook = note
