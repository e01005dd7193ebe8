"""The launcher's terminal: each worker's lines behind its name, and messages of the launcher."""

import os
import re
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

from unisono.host.status_line import status_in

WorkerName = int | str
"""What a worker is called: by its rank, or by its id where workers come and go and ranks change."""


def label(worker: WorkerName) -> str:
    """``rank 1``, or ``w3``: before each line of its output."""
    return f"rank {worker}" if isinstance(worker, int) else worker


def called(worker: WorkerName) -> str:
    """``rank 1``, or ``worker w3``: in a sentence."""
    return f"rank {worker}" if isinstance(worker, int) else f"worker {worker}"


def number(worker: WorkerName) -> int:
    """A number that neighbours do not share, for colours."""
    return worker if isinstance(worker, int) else int("0" + "".join(filter(str.isdecimal, worker)))


Stream = Literal["out", "err"]

COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
RESET = "\x1b[0m"
ERASE = "\r\x1b[K"
"""The line in which the cursor stands."""

MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
"""Escape sequences other than colours: they move the cursor, which several workers share."""


class Terminal:
    """Writes whole lines to the launcher's two streams, from any thread.

    A stream that nobody reads any more, or that cannot be written, falls silent; training and logs go on. On a screen
    the newest status of a worker, such as a progress bar, stays below all lines.

    Args:
        out: the stream of what workers print.
        err: the stream of errors, and of the launcher's own lines.
        colours: whether workers' names are coloured.
        is_screen: whether both are shown on one screen, on which a line can be overwritten.
    """

    def __init__(self, out: TextIO, err: TextIO, *, colours: bool = False, is_screen: bool = False) -> None:
        self._streams: Mapping[Stream, TextIO] = {"out": out, "err": err}
        lock = threading.Lock()
        self._locks: Mapping[Stream, threading.Lock] = {"out": lock, "err": lock if is_screen else threading.Lock()}
        self._colours, self._is_screen = colours, is_screen
        self._status = ""

    @classmethod
    def of_this_process(cls) -> "Terminal":
        """The process's own streams; coloured on a terminal, unless NO_COLOR is set."""
        is_screen = sys.stdout.isatty()
        return cls(sys.stdout, sys.stderr, colours=is_screen and not os.environ.get("NO_COLOR"), is_screen=is_screen)

    def show(self, worker: WorkerName, stream: Stream, lines: Sequence[str]) -> None:
        """Write lines of a worker; its newest status, if there is one among them, takes the place of the one before."""
        told = [status_in(line) for line in lines]
        status = next((one for one in reversed(told) if one is not None), None)
        text = "".join(f"{self._line(worker, line)}\n" for line, one in zip(lines, told, strict=True) if one is None)
        if text or status is not None:
            self._write(stream, text, status)

    def say(self, words: str) -> None:
        """Write a line of the launcher's own."""
        self._write("err", f"unisono: {words}\n")

    def conclude(self, text: str) -> None:
        """Write the last words, as they are. There is no status any more."""
        self._write("err", text, "")

    def _line(self, worker: WorkerName, line: str) -> str:
        line = MOVES.sub("", line)
        if not self._colours:
            return f"[{label(worker)}] {line}"
        end = RESET if "\x1b[" in line else ""
        return f"\x1b[{COLOURS[number(worker) % len(COLOURS)]}m[{label(worker)}]{RESET} {line}{end}"

    def _write(self, name: Stream, text: str, status: str | None = None) -> None:
        with self._locks[name]:
            if self._status:
                self._put("out", ERASE)
            self._put(name, text)
            if status is not None and self._is_screen:
                self._status = status
            if self._status:
                self._put("out", self._status[: shutil.get_terminal_size().columns - 1])

    def _put(self, name: Stream, text: str) -> None:
        stream = self._streams[name]
        try:
            if text:
                stream.write(text)
                stream.flush()
        except OSError:
            _silence(stream)


class SilentTerminal(Terminal):
    """Shows nothing: for a caller who reads the logs."""

    def __init__(self) -> None:
        super().__init__(sys.stdout, sys.stderr)

    def _put(self, name: Stream, text: str) -> None:
        pass


def _silence(stream: TextIO) -> None:
    # What is buffered would fail again at exit: let it, and all that follows, go nowhere.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
