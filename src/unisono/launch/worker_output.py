"""What one worker writes: into its log as it is, and onto the terminal line by line."""

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
