"""The launcher's terminal: each worker's lines behind its name, and messages of the launcher."""

import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

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
MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
"""Escape sequences other than colours: they move the cursor, which several workers share."""


class Terminal:
    """Writes whole lines to the launcher's two streams, from any thread.

    A stream that nobody reads any more, or that cannot be written, falls silent; training and logs go on.
    """

    def __init__(self, out: TextIO, err: TextIO, *, colours: bool = False) -> None:
        self._streams: Mapping[Stream, TextIO] = {"out": out, "err": err}
        self._locks: Mapping[Stream, threading.Lock] = {"out": threading.Lock(), "err": threading.Lock()}
        self._colours = colours

    @classmethod
    def of_this_process(cls) -> "Terminal":
        """The process's own streams; coloured on a terminal, unless NO_COLOR is set."""
        return cls(sys.stdout, sys.stderr, colours=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))

    def show(self, worker: WorkerName, stream: Stream, lines: Sequence[str]) -> None:
        """Write lines of a worker."""
        if lines:
            self._write(stream, "".join(f"{self._line(worker, line)}\n" for line in lines))

    def say(self, words: str) -> None:
        """Write a line of the launcher's own."""
        self._write("err", f"unisono: {words}\n")

    def conclude(self, text: str) -> None:
        """Write the last words, as they are."""
        if text:
            self._write("err", text)

    def _line(self, worker: WorkerName, line: str) -> str:
        line = MOVES.sub("", line)
        if not self._colours:
            return f"[{label(worker)}] {line}"
        end = RESET if "\x1b[" in line else ""
        return f"\x1b[{COLOURS[number(worker) % len(COLOURS)]}m[{label(worker)}]{RESET} {line}{end}"

    def _write(self, name: Stream, text: str) -> None:
        stream = self._streams[name]
        with self._locks[name]:
            try:
                stream.write(text)
                stream.flush()
            except OSError:
                _silence(stream)


class SilentTerminal(Terminal):
    """Shows nothing: for a caller who reads the logs."""

    def __init__(self) -> None:
        super().__init__(sys.stdout, sys.stderr)

    def _write(self, name: Stream, text: str) -> None:
        pass


def _silence(stream: TextIO) -> None:
    # What is buffered would fail again at exit: let it, and all that follows, go nowhere.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
