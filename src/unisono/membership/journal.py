"""The coordinator's lines in the run folder's journal, which the workers write as well."""

import os
import warnings
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.errors import UnisonoWarning
from unisono.jsonl import append_line, open_lines, read_lines


class Journal:
    """Appends events to a file of JSON lines, each with the time it happened.

    What cannot be written is warned of and left out: no job ends for want of a line in its journal.

    Args:
        path: of the file; it is made with the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def line(self, event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What there is to write of an event that happens now."""
        return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines, at once and each of them whole."""
        try:
            descriptor = open_lines(self._path)
            try:
                for line in lines:
                    append_line(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            warnings.warn(f"{self._path} is incomplete: {error}. The job goes on", UnisonoWarning, stacklevel=2)

    def complete(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append those of the lines that are not there: whoever was about to write them has been killed."""
        there = read_lines(self._path)
        self.append(line for line in lines if line not in there)
