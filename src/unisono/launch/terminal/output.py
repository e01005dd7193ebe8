"""The output of one worker: goes into its log as it is, and onto the terminal line by line."""

import asyncio
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unisono.host.status_line import without_status
from unisono.jsonl import open_lines
from unisono.launch.terminal.terminal import Stream, Terminal, WorkerName

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
        """The lines that these bytes complete.

        Args:
            data: what came.
            now: a clock that never goes back, in seconds.
        """
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


# What one worker writes: into its log as it is, onto the terminal line by line.

CHUNK = 64 * 1024

DRAIN_S = 1.0
MOST_AFTER_END = 4 * 1024 * 1024
"""A program that left its worker's group may hold the output open after the worker's end: it is not waited for."""

Say = Callable[[str], None]


class Log:
    """A worker's log. A disk that is full is said once; the worker goes on.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, say: Say) -> None:
        self._file = os.fdopen(open_lines(path), "ab", buffering=0)
        self._path, self._say = path, say
        self._broken = False

    def write(self, data: bytes) -> None:
        """Append bytes."""
        if self._broken:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._broken = True
            self._say(f"{self._path} cannot be written any more ({error.strerror}); the job goes on without it")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Pipe:
    """One output stream of a worker. It is made before the worker starts, and read from then on."""

    def __init__(self, worker: WorkerName, stream: Stream, log: Log, terminal: Terminal) -> None:
        self._reading, self.writing = os.pipe()
        self._worker, self._stream, self._log, self._terminal = worker, stream, log, terminal
        self._chunks = 0
        self._waits = False
        self._left_to_read = float("inf")
        self._reader = asyncio.StreamReader()

    async def pump(self) -> None:
        """Show and log whatever comes, until nobody can write any more."""
        loop = asyncio.get_running_loop()
        file = os.fdopen(self._reading, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._reader), file)
        splitter = LineSplitter()
        try:
            while data := await self._read():
                self._log.write(without_status(data))
                await self._show(splitter.feed(data, time.monotonic()))
        finally:
            transport.close()
        await self._show(splitter.flush())

    def worker_ended(self) -> None:
        """From now on only what is on its way is read."""
        self._left_to_read = MOST_AFTER_END
        asyncio.get_running_loop().call_later(DRAIN_S, self._stop_waiting, self._chunks)

    def abandon(self) -> None:
        """No worker was started: close both ends."""
        os.close(self._reading)

    async def _read(self) -> bytes:
        if self._left_to_read <= 0:
            return b""
        self._waits = True
        data = await self._reader.read(CHUNK)
        self._waits = False
        self._chunks += 1
        self._left_to_read -= len(data)
        return data

    async def _show(self, lines: list[str]) -> None:
        # On a thread: a terminal that is stopped must not keep the launcher from hearing signals and exits.
        if lines:
            await asyncio.to_thread(self._terminal.show, self._worker, self._stream, lines)

    def _stop_waiting(self, chunks: int) -> None:
        if self._waits and self._chunks == chunks:
            self._reader.feed_eof()
        elif not self._reader.at_eof():
            asyncio.get_running_loop().call_later(DRAIN_S, self._stop_waiting, self._chunks)


class WorkerOutput:
    """Both streams of a worker, and its log.

    Raises:
        OSError: the log cannot be opened, or there are no descriptors left.
    """

    def __init__(self, worker: WorkerName, log: Path, terminal: Terminal, say: Say) -> None:
        self._log = Log(log, say)
        try:
            self.out = Pipe(worker, "out", self._log, terminal)
            self.err = Pipe(worker, "err", self._log, terminal)
        except OSError:
            self._log.close()
            raise
        self._pumps: list[asyncio.Task[None]] = []

    def worker_started(self) -> None:
        """The worker holds the writing ends now."""
        self._close_writing_ends()
        self._pumps = [asyncio.create_task(pipe.pump()) for pipe in (self.out, self.err)]

    def abandon(self) -> None:
        """No worker was started."""
        self._close_writing_ends()
        self.out.abandon()
        self.err.abandon()
        self._log.close()

    async def drain(self) -> None:
        """The worker has ended: show and log what is left."""
        for pipe in (self.out, self.err):
            pipe.worker_ended()
        try:
            await asyncio.gather(*self._pumps)
        finally:
            self._log.close()

    def _close_writing_ends(self) -> None:
        for pipe in (self.out, self.err):
            with suppress(OSError):
                os.close(pipe.writing)
