"""The coordinator's lines in the run folder's journal, which the workers write as well."""

import os
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.errors import UnisonoWarning
from unisono.jsonl import append_line, open_lines


class Journal:
    """Appends events to a file of JSON lines, each with the time it happened.

    What cannot be written is warned of and left out: no job ends for want of a line in its journal.

    Args:
        path: of the file; it is made with the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append an event, at once and whole."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            descriptor = open_lines(self._path)
            try:
                append_line(descriptor, {"time": now, "event": event, **fields})
            finally:
                os.close(descriptor)
        except OSError as error:
            warnings.warn(f"{self._path} is incomplete: {error}. The job goes on", UnisonoWarning, stacklevel=2)
