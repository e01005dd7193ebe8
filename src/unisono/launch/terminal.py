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
    the newest status of a worker, such as a progress bar, stays below all lines. The launcher's own lines go to
    ``err``; ``is_screen`` says whether both streams are shown on one screen.
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
        statuses = [status_in(line) for line in lines]
        status = next((shown for shown in reversed(statuses) if shown is not None), None)
        text = "".join(
            f"{self._line(worker, line)}\n" for line, shown in zip(lines, statuses, strict=True) if shown is None
        )
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


# Cutting what a worker writes into lines that can be shown.

END = re.compile(rb"\r?\n|\r(?!\Z)")
"""The end of a line, or of a progress bar's update. A carriage return in the last place may be either."""

LONGEST = 32 * 1024
UPDATE_EVERY_S = 1.0


class LineSplitter:
    """Takes bytes as they come, gives lines of text.

    What a carriage return ends is an update of a progress bar: the next one would overwrite it, so one a second
    is enough. A line longer than ``longest`` bytes comes in pieces. Bytes that are no UTF-8 become a
    replacement mark.
    """

    def __init__(self, longest: int = LONGEST, update_every_s: float = UPDATE_EVERY_S) -> None:
        self._longest = longest
        self._update_every_s = update_every_s
        self._rest = b""
        self._overwritten = b""
        self._updated_at = -float("inf")

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that these bytes complete; ``now`` is of a clock in seconds that never goes back."""
        known = max(0, len(self._rest) - 1)  # no end of a line in there, save a carriage return in the last place
        buffer = self._rest + data
        lines: list[str] = []
        start = 0
        for end in END.finditer(buffer, known):
            lines += self._ended(buffer[start : end.start()], end.group(), now)
            start = end.end()
        pieces, self._rest = self._cut(buffer[start:])
        return lines + pieces

    def flush(self) -> list[str]:
        """What is left when nothing more comes."""
        rest = self._rest.rstrip(b"\r") or self._overwritten
        self._rest = self._overwritten = b""
        return [_text(rest)] if rest else []

    def _ended(self, line: bytes, end: bytes, now: float) -> list[str]:
        is_update = end == b"\r"
        if is_update and not line:
            return []
        if is_update and now - self._updated_at < self._update_every_s:
            self._overwritten = line
            return []
        self._overwritten = b""
        if is_update:
            self._updated_at = now
        pieces, rest = self._cut(line)
        return [*pieces, _text(rest)] if rest or not pieces else pieces

    def _cut(self, line: bytes) -> tuple[list[str], bytes]:
        """Pieces of the greatest length, and the rest."""
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
