"""The output of one worker: it goes unchanged into the worker's log, and line by line onto the terminal."""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unisono.host.status_line import without_status
from unisono.jsonl import open_lines
from unisono.launch.terminal import LineSplitter, Stream, Terminal, WorkerName

CHUNK = 64 * 1024

DRAIN_S = 1.0
MOST_AFTER_END = 4 * 1024 * 1024
"""A program that left its worker's group may hold the output open after the worker's end: no more is read of it."""

Say = Callable[[str], None]


class Log:
    """A worker's log. If the disk is full, it says so once, and the worker goes on.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, say: Say) -> None:
        self._file = os.fdopen(open_lines(path), "ab", buffering=0)
        self._path, self._say = path, say
        self._broken = False

    def write(self, data: bytes) -> None:
        """Append bytes, unless an earlier write has failed."""
        if self._broken:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._broken = True
            self._say(f"{self._path} cannot be written any more ({error.strerror}); the job goes on without it")

    def close(self) -> None:
        """Close the log file."""
        self._file.close()


class Pipe:
    """One output stream of a worker, opened before the worker starts."""

    def __init__(self, worker: WorkerName, stream: Stream, log: Log, terminal: Terminal) -> None:
        self._read_end, self.write_end = os.pipe()
        self._worker, self._stream, self._log, self._terminal = worker, stream, log, terminal
        self._chunks = 0
        self._is_waiting = False
        self._remaining = float("inf")
        self._reader = asyncio.StreamReader()

    async def pump(self) -> None:
        """Show and log the output, until no process has the writing end open any more."""
        loop = asyncio.get_running_loop()
        file = os.fdopen(self._read_end, "rb", buffering=0)
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
        """Stop reading soon: only output that the worker has already written is still read."""
        self._remaining = MOST_AFTER_END
        asyncio.get_running_loop().call_later(DRAIN_S, self._stop_waiting, self._chunks)

    def abandon(self) -> None:
        """Close the reading end, since no worker was started."""
        os.close(self._read_end)

    async def _read(self) -> bytes:
        if self._remaining <= 0:
            return b""
        self._is_waiting = True
        data = await self._reader.read(CHUNK)
        self._is_waiting = False
        self._chunks += 1
        self._remaining -= len(data)
        return data

    async def _show(self, lines: list[str]) -> None:
        # On a thread, since a terminal that is stopped must not keep the launcher from handling signals and exits.
        if lines:
            await asyncio.to_thread(self._terminal.show, self._worker, self._stream, lines)

    def _stop_waiting(self, chunks: int) -> None:
        if self._is_waiting and self._chunks == chunks:
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
        """Close the writing ends, which only the worker has now, and start to read."""
        self._close_writing_ends()
        self._pumps = [asyncio.create_task(pipe.pump()) for pipe in (self.out, self.err)]

    def abandon(self) -> None:
        """Close everything, since no worker was started."""
        self._close_writing_ends()
        self.out.abandon()
        self.err.abandon()
        self._log.close()

    async def drain(self) -> None:
        """Show and log the rest of the output of a worker that has ended."""
        for pipe in (self.out, self.err):
            pipe.worker_ended()
        try:
            await asyncio.gather(*self._pumps)
        finally:
            self._log.close()

    def _close_writing_ends(self) -> None:
        for pipe in (self.out, self.err):
            with suppress(OSError):
                os.close(pipe.write_end)
