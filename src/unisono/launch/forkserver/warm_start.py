"""The launcher's side of the fork server: workers that begin at once, instead of loading torch first."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from unisono.launch.forkserver.request import WorkerRequest
from unisono.launch.program import start_program
from unisono.received import parse_object

FORK_SERVER = "unisono.launch.forkserver.server"
LONGEST_ANSWER = 64 * 1024


class ColdStart(Exception):
    """The fork server cannot start a worker; says why. The launcher starts it as a program of its own."""


@dataclass(eq=False, slots=True)
class WarmWorker:
    """A forked worker; to its launcher like an ``asyncio.subprocess.Process``.

    Attributes:
        pid: its process id.
    """

    pid: int
    _ended: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""
        return await asyncio.shield(self._ended)

    def end(self, code: int) -> None:
        """It has ended."""
        if not self._ended.done():
            self._ended.set_result(code)


class WarmStart:
    """Starts the fork server, and has it fork workers. Use :meth:`open`."""

    def __init__(self, channel: socket.socket, process: Process) -> None:
        self._channel, self._process = channel, process
        self._gone = ""
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked: deque[asyncio.Future[WarmWorker]] = deque()
        self._workers: dict[int, WarmWorker] = {}
        asyncio.get_running_loop().add_reader(channel, self._hear)

    @classmethod
    async def open(cls, environment: Mapping[str, str], log: Path) -> "WarmStart":
        """Start a fork server. It loads torch while the caller goes on.

        Args:
            environment: the environment of its workers, without the variables that differ between them.
            log: the file for its own output.

        Raises:
            ColdStart: this system has no such thing, or the process cannot be started.
        """
        if sys.platform != "linux":
            raise ColdStart(f"{sys.platform} is not Linux")
        return cls(*await _begun(environment, log))

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._process.pid

    async def ready(self) -> None:
        """Wait until it can fork.

        Raises:
            ColdStart: it cannot.
        """
        if why := await asyncio.shield(self._ready):
            raise ColdStart(why)

    async def start(self, request: WorkerRequest, out: int, err: int, *kept: int) -> WarmWorker:
        """Have a worker forked.

        Args:
            request: the command and environment of the worker.
            out: the descriptor that becomes its standard output; stays open here.
            err: the descriptor that becomes its standard error; stays open here.
            kept: at most one more descriptor that it inherits, as number ``FIRST_KEPT``.

        Raises:
            ColdStart: the fork server did not fork it.
        """
        await self.ready()
        if self._gone:
            raise ColdStart(self._gone)
        try:
            socket.send_fds(self._channel, [request.to_json()], [out, err, *kept])
        except OSError as error:  # too long, or the fork server has just ended
            raise ColdStart(f"the fork server cannot be asked: {error}") from error
        answer: asyncio.Future[WarmWorker] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        return await asyncio.shield(answer)

    def wake(self) -> None:
        """Have the fork server go on, if somebody has stopped it: nobody else says how its workers have ended."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)

    async def close(self) -> None:
        """End the fork server, and with it whichever of its workers still runs."""
        self._hang_up("it was closed")
        with suppress(ProcessLookupError):
            self._process.kill()  # it may still be loading, and then would not notice
        await self._process.wait()

    def _hear(self) -> None:
        try:
            data = self._channel.recv(LONGEST_ANSWER)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._understand(parse_object(data))
        else:
            self._hang_up("the fork server has ended")

    def _understand(self, message: dict[str, int | str]) -> None:
        match message:
            case {"ready": str(why)}:
                self._ready.set_result(why)
            case {"refused": str(why)}:
                _settle(self._asked.popleft(), ColdStart(why))
            case {"started": int(pid)}:
                self._workers[pid] = WarmWorker(pid)
                _settle(self._asked.popleft(), self._workers[pid])
            case {"ended": int(pid), "code": int(code)}:
                self._workers.pop(pid).end(code)
            case _:
                raise AssertionError(f"the fork server says {message}")

    def _hang_up(self, why: str) -> None:
        if self._gone:
            return
        self._gone = why
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        if not self._ready.done():
            self._ready.set_result(why)
        while self._asked:
            _settle(self._asked.popleft(), ColdStart(why))
        for worker in self._workers.values():
            worker.end(-signal.SIGKILL)  # by the kernel, in the moment in which the fork server ended
        self._workers.clear()


def _settle(answer: asyncio.Future[WarmWorker], found: WarmWorker | ColdStart) -> None:
    if answer.done():
        return
    if isinstance(found, ColdStart):
        answer.set_exception(found)
    else:
        answer.set_result(found)


async def _begun(environment: Mapping[str, str], log: Path) -> tuple[socket.socket, Process]:
    """A fork server, and the socket that leads to it."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ColdStart(str(error)) from error
    ours.setblocking(False)
    told = {**environment, "UNISONO_LAUNCHER_PID": str(os.getpid())}
    try:
        with theirs:
            number = theirs.fileno()
            return ours, await start_program(("-u", "-m", FORK_SERVER, str(number)), told, log, kept=number)
    except OSError as error:
        ours.close()
        raise ColdStart(str(error)) from error
