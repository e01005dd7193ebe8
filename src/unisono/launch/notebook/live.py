"""What a cell shows while its job trains: the newest figures, and what the workers print."""

from __future__ import annotations

import html
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from unisono.errors import Unreadable
from unisono.received import open_file, parse_json

LINES = 12
"""Of the workers' output, the last ones, that a cell shows."""

LONGEST = 2**20
"""Bytes of a file that are read at a time."""

FIGURES: Mapping[str, str] = {
    "step": "step {}",
    "epoch": "epoch {}",
    "loss": "loss {:.4g}",
    "batch_size": "batch {}",
    "samples_per_s": "{:.4g} samples/s",
    "world_size": "workers {}",
}
"""Fields of ``metrics.jsonl``, and how they are shown."""


class Tail:
    """The lines that are appended to a file.

    Args:
        path: the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def new(self) -> list[bytes]:
        """The whole lines since the last time. A file that has become shorter is read from its beginning."""
        try:
            with open_file(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                data = file.read(LONGEST)
        except (OSError, Unreadable):
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def figures_of(lines: Sequence[bytes]) -> Mapping[str, Any]:
    """The newest line of a step among lines of ``metrics.jsonl``; nothing if there is none."""
    for line in reversed(lines):
        with suppress(Unreadable):
            found = parse_json(line)
            if isinstance(found, dict) and "loss" in found:
                return found
    return {}


def in_a_line(figures: Mapping[str, Any]) -> str:
    """Figures of a step for people: ``step 12, epoch 0, loss 0.51``. What is no number is left out."""
    shown = []
    for name, form in FIGURES.items():
        value = figures.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            shown.append(form.format(value))
    return ", ".join(shown)


class JobDisplay(Protocol):
    """Where a job is shown."""

    def show(self, figures: str, lines: Sequence[str]) -> None:
        """Show the newest figures, and lines that were printed since the last time."""
        ...


class PlainDisplay:
    """Prints lines as they come: on a terminal, or where nothing can be shown twice.

    Args:
        write: a function that writes a text; by default to the standard output of this moment.
    """

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or sys.stdout.write

    def show(self, figures: str, lines: Sequence[str]) -> None:
        """The figures are in what the script prints."""
        for line in lines:
            self._write(f"{line}\n")


class Board:
    """Text for a cell: the last lines, and the figures below them.

    Attributes:
        lines: the last lines.
        figures: the newest figures.
    """

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LINES)
        self.figures = "starting"

    def _repr_mimebundle_(self, **about: Any) -> dict[str, str]:
        text = "\n".join([*self.lines, self.figures])
        shown = f"<pre>{html.escape(text)}</pre>"
        return {"text/plain": text, "text/html": shown}


class CellDisplay:
    """Shows them in one place of the cell's output, and replaces them there.

    Args:
        display: IPython's function of this name.
    """

    def __init__(self, display: Callable[..., Any]) -> None:
        self._board = Board()
        self._handle = display(self._board, display_id=True)

    def show(self, figures: str, lines: Sequence[str]) -> None:
        """Replace what is there."""
        self._board.lines.extend(lines)
        self._board.figures = figures or self._board.figures
        self._handle.update(self._board)


def cell_here() -> JobDisplay:
    """The cell that runs now; plain lines where there is no notebook."""
    with suppress(ImportError):
        from IPython import get_ipython
        from IPython.display import display

        if getattr(get_ipython(), "kernel", None) is not None:
            return CellDisplay(display)
    return PlainDisplay()
