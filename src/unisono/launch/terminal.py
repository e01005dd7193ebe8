"""The launcher's terminal: the workers' lines, each with a name."""

import os
import re
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

from unisono.host.status_line import status_in

WorkerName = int | str
"""The name of a worker: its rank, or its id where workers come and go and ranks change."""


def label(worker: WorkerName) -> str:
    """The label before each line of its output: ``rank 1``, or ``w3``."""
    return f"rank {worker}" if isinstance(worker, int) else worker


def called(worker: WorkerName) -> str:
    """The name of a worker in a sentence: ``rank 1``, or ``worker w3``."""
    return f"rank {worker}" if isinstance(worker, int) else f"worker {worker}"


def number(worker: WorkerName) -> int:
    """A number that neighbours do not share, for colours and for order."""
    return worker if isinstance(worker, int) else int("0" + "".join(filter(str.isdecimal, worker)))


Stream = Literal["out", "err"]

COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
RESET = "\x1b[0m"
ERASE = "\r\x1b[K"
"""Erases the line of the cursor."""

MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
"""Escape sequences other than colours are left out: they move the cursor, which several workers share."""


class Terminal:
    """Writes whole lines to the launcher's two streams, from any thread.

    After an error nothing more is written to a stream; training and logs go on. On a screen the newest status of a
    worker, such as a progress bar, stays below all lines. The launcher's own lines go to ``err``; ``is_screen`` says
    whether both streams are shown on one screen.
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
        """Write lines of a worker; the newest status among them, if there is one, replaces the one that is shown."""
        statuses = [status_in(line) for line in lines]
        newest = next((status for status in reversed(statuses) if status is not None), None)
        text = "".join(
            f"{self._line(worker, line)}\n" for line, status in zip(lines, statuses, strict=True) if status is None
        )
        if text or newest is not None:
            self._write(stream, text, newest)

    def say(self, words: str) -> None:
        """Write a line of the launcher."""
        self._write("err", f"unisono: {words}\n")

    def conclude(self, text: str) -> None:
        """Write the last text as it is, and remove the status."""
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
    # Python writes what is buffered again at exit, which would fail again, unless it goes to /dev/null.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


# Splitting a worker's output into lines that can be shown.

END = re.compile(rb"\r?\n|\r(?!\Z)")
"""The end of a line, or of a progress bar's update. A carriage return in the last place may be either."""

LONGEST = 32 * 1024
UPDATE_EVERY_S = 1.0


class LineSplitter:
    """Splits bytes, as they come, into lines of text.

    Text that ends with a carriage return is an update of a progress bar: the next one would overwrite it, so one a
    second is shown. A line longer than ``longest`` bytes comes in pieces. Bytes that are no UTF-8 become a replacement
    mark.
    """

    def __init__(self, longest: int = LONGEST, update_every_s: float = UPDATE_EVERY_S) -> None:
        self._longest = longest
        self._update_every_s = update_every_s
        self._rest = b""
        self._overwritten = b""
        self._updated_at = -float("inf")

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that these bytes complete; ``now`` is the time of a monotonic clock, in seconds."""
        searched = max(
            0, len(self._rest) - 1
        )  # the rest has no end of a line, save a carriage return in the last place
        buffer = self._rest + data
        lines: list[str] = []
        start = 0
        for end in END.finditer(buffer, searched):
            lines += self._lines_of(buffer[start : end.start()], end.group(), now)
            start = end.end()
        pieces, self._rest = self._split(buffer[start:])
        return lines + pieces

    def flush(self) -> list[str]:
        """The last line, if it is not empty, when no more bytes come."""
        rest = self._rest.rstrip(b"\r") or self._overwritten
        self._rest = self._overwritten = b""
        return [_text(rest)] if rest else []

    def _lines_of(self, line: bytes, end: bytes, now: float) -> list[str]:
        is_update = end == b"\r"
        if is_update and not line:
            return []
        if is_update and now - self._updated_at < self._update_every_s:
            self._overwritten = line
            return []
        self._overwritten = b""
        if is_update:
            self._updated_at = now
        pieces, rest = self._split(line)
        return [*pieces, _text(rest)] if rest or not pieces else pieces

    def _split(self, line: bytes) -> tuple[list[str], bytes]:
        """Pieces of at most ``longest`` bytes, none of which ends inside a character, and the rest."""
        pieces, start = [], 0
        while len(line) - start > self._longest:
            stop = start + self._longest
            while stop > start + self._longest - 3 and _continues_a_character(line[stop]):
                stop -= 1
            pieces.append(_text(line[start:stop]))
            start = stop
        return pieces, line[start:]


def _continues_a_character(byte: int) -> bool:
    return byte & 0b1100_0000 == 0b1000_0000


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")
