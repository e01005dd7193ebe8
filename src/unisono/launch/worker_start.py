"""Starting workers: forked from the fork server where that is possible, otherwise as programs of their own."""

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from unisono.jsonl import open_lines
from unisono.launch.command import RendezvousSocket, WorkerCommand
from unisono.launch.worker_output import WorkerOutput
from unisono.received import parse_json, parse_object, value_of


async def start_program(words: Sequence[str], environment: Mapping[str, str], log: Path, inherited: int) -> Process:
    """Start Python in a session of its own, with an empty standard input and an inherited descriptor.

    Raises:
        OSError: it cannot be started.
    """
    with os.fdopen(open_lines(log), "ab", 0) as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a module in the working folder must not hide one of the standard library
            *words,
            env=environment,
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[inherited],
        )


# The request of a launcher to the fork server.

FIRST_INHERITED = 3
"""The number that a third descriptor, after those of output and errors, has in the worker."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A request for one worker. The descriptors of its output and errors travel beside it, and maybe a third.

    Attributes:
        argv: the script and its arguments, as ``unisono.launch.worker`` takes them.
        variables: the variables that it gets on top of the fork server's own environment.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    cwd: str

    def to_json(self) -> bytes:
        """The request as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "WorkerRequest":
        """The inverse of ``to_json``.

        Raises:
            Unreadable: the bytes are no request.
        """
        request: WorkerRequest = value_of(cls, parse_json(data), "the request")
        return request


# The launcher's side of the fork server, whose workers begin at once, instead of loading torch first.

FORK_SERVER = "unisono.launch.fork_server"
LONGEST_REPLY = 64 * 1024


class ColdStart(Exception):
    """The fork server cannot start a worker; says why. The launcher starts it as a program of its own."""


@dataclass(eq=False, slots=True)
class WarmWorker:
    """A forked worker; to its launcher like an ``asyncio.subprocess.Process``."""

    pid: int
    _ended: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""
        return await asyncio.shield(self._ended)  # a waiter that is cancelled must not cancel the future of the others

    def end(self, code: int) -> None:
        """Note that it has ended."""
        if not self._ended.done():
            self._ended.set_result(code)


class WarmStart:
    """Starts the fork server, and has it fork workers. Made by :meth:`open`."""

    def __init__(self, channel: socket.socket, process: Process) -> None:
        self._channel, self._process = channel, process
        self._gone = ""
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending: deque[asyncio.Future[WarmWorker]] = deque()
        self._workers: dict[int, WarmWorker] = {}
        self._lock = asyncio.Lock()  # one request at a time, since the socket's buffer holds few
        asyncio.get_running_loop().add_reader(channel, self._receive)

    @classmethod
    async def open(cls, environment: Mapping[str, str], log: Path) -> "WarmStart":
        """Start a fork server. It loads torch while the caller goes on.

        The environment is that of its workers, without the variables that differ between them.

        Raises:
            ColdStart: the system is not Linux, or the process cannot be started.
        """
        if sys.platform != "linux":
            raise ColdStart(f"{sys.platform} is not Linux")
        return cls(*await _start_fork_server(environment, log))

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

    async def start(self, request: WorkerRequest, out: int, err: int, *inherited: int) -> WarmWorker:
        """Have a worker forked. All descriptors stay open here; one in ``inherited`` becomes ``FIRST_INHERITED``.

        Raises:
            ColdStart: the fork server did not fork it.
        """
        await self.ready()
        async with self._lock:
            if self._gone:
                raise ColdStart(self._gone)
            try:
                socket.send_fds(self._channel, [request.to_json()], [out, err, *inherited])
            except OSError as error:  # too long, or the fork server has just ended
                raise ColdStart(f"the fork server cannot be asked: {error}") from error
            reply: asyncio.Future[WarmWorker] = asyncio.get_running_loop().create_future()
            self._pending.append(reply)
            return await asyncio.shield(reply)

    def wake(self) -> None:
        """Have the fork server go on, if it was stopped (SIGSTOP): only it can report how its workers have ended."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)

    async def close(self) -> None:
        """End the fork server, and with it those of its workers that still run."""
        self._disconnect("it was closed")
        with suppress(ProcessLookupError):
            self._process.kill()  # while it is still loading, it would not notice the end of the connection
        await self._process.wait()

    def _receive(self) -> None:
        try:
            data = self._channel.recv(LONGEST_REPLY)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._handle(parse_object(data))
        else:
            self._disconnect("the fork server has ended")

    def _handle(self, message: dict[str, int | str]) -> None:
        match message:
            case {"ready": str(why)}:
                self._ready.set_result(why)
            case {"refused": str(why)}:
                _settle(self._pending.popleft(), ColdStart(why))
            case {"started": int(pid)}:
                self._workers[pid] = WarmWorker(pid)
                _settle(self._pending.popleft(), self._workers[pid])
            case {"ended": int(pid), "code": int(code)}:
                self._workers.pop(pid).end(code)
            case _:
                raise AssertionError(f"the fork server says {message}")

    def _disconnect(self, why: str) -> None:
        if self._gone:
            return
        self._gone = why
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        if not self._ready.done():
            self._ready.set_result(why)
        while self._pending:
            _settle(self._pending.popleft(), ColdStart(why))
        for worker in self._workers.values():
            worker.end(-signal.SIGKILL)  # the kernel kills it when the fork server ends
        self._workers.clear()


def _settle(reply: asyncio.Future[WarmWorker], result: WarmWorker | ColdStart) -> None:
    if reply.done():
        return
    if isinstance(result, ColdStart):
        reply.set_exception(result)
    else:
        reply.set_result(result)


async def _start_fork_server(environment: Mapping[str, str], log: Path) -> tuple[socket.socket, Process]:
    """Start a fork server, and return the socket that leads to it."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ColdStart(str(error)) from error
    ours.setblocking(False)
    variables = {**environment, "UNISONO_LAUNCHER_PID": str(os.getpid())}
    try:
        with theirs:
            number = theirs.fileno()
            return ours, await start_program(("-u", "-m", FORK_SERVER, str(number)), variables, log, inherited=number)
    except OSError as error:
        ours.close()
        raise ColdStart(str(error)) from error


STORE_FD = "UNISONO_STORE_FD"
"""The variable with the descriptor of the socket at which workers meet, which the first of them inherits."""


class WorkerProcess(Protocol):
    """The process of a worker that has been started."""

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        ...

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""
        ...


class WorkerStart:
    """Starts the workers of one launcher.

    Without a log there is no fork server of its own; a shared one serves other launchers, too.
    """

    def __init__(
        self, common: WorkerCommand, log: Path | None, say: Callable[[str], None], shared: WarmStart | None = None
    ) -> None:
        self._common, self._log, self._say = common, log, say
        self._warm, self._is_shared = shared, shared is not None
        self._is_cold = shared is None and log is None
        self._closed = False

    async def open(self) -> None:
        """Start the fork server, which loads torch while the caller goes on."""
        if self._log is None or self._warm is not None:
            return
        try:
            self._warm = await WarmStart.open(self._common.environment(os.environ), self._log)
        except ColdStart as why:
            self._go_cold(why)

    async def loaded(self, unwanted: asyncio.Event) -> None:
        """Wait until the fork server can fork, or it is clear that it cannot, or ``unwanted`` is set."""
        if self._warm is not None:
            waits = [asyncio.create_task(self._warm.ready()), asyncio.create_task(unwanted.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)  # start() reports a ColdStart

    async def start(self, command: WorkerCommand, output: WorkerOutput) -> WorkerProcess:
        """Start a worker, as the leader of a process group of its own.

        Raises:
            OSError: it cannot be started.
        """
        socket_ = command.variables.get(STORE_FD)
        inherited = () if socket_ is None else (int(socket_),)
        if self._warm is not None and not self._is_cold:
            try:
                renumbered = {STORE_FD: str(FIRST_INHERITED)} if inherited else {}
                request = WorkerRequest(command.script, {**command.variables, **renumbered}, os.getcwd())  # noqa: PTH109 (as text)
                return await self._warm.start(request, output.out.write_end, output.err.write_end, *inherited)
            except ColdStart as why:
                self._go_cold(why)
        if self._closed:
            raise OSError("the launcher ends")
        return await asyncio.create_subprocess_exec(
            *command.argv,
            env=command.environment(os.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.out.write_end,
            stderr=output.err.write_end,
            start_new_session=True,
            pass_fds=inherited,
        )

    def wake(self) -> None:
        """Have the fork server go on, if it was stopped, before workers are ended: it reports their ends."""
        if self._warm is not None:
            self._warm.wake()

    async def close(self) -> None:
        """End the fork server, unless it is shared, and with it the workers that it has forked. No more are started."""
        self._closed = True
        if self._warm is not None and not self._is_shared:
            await self._warm.close()

    def _go_cold(self, why: ColdStart) -> None:
        # The fork server goes on, since the workers that it has forked would end with it.
        if not self._is_cold and not self._closed:
            self._is_cold = True
            self._say(f"workers begin by loading torch from now on: {why}")


@contextmanager
def listening(processes: int) -> Iterator[RendezvousSocket | None]:
    """A socket on loopback, at a port that the system chooses, open before any process connects to it.

    Args:
        processes: the number of processes that meet there; one alone needs no socket.
    """
    if processes == 1:
        yield None
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(processes * 2 + 128)
        yield RendezvousSocket(listener.getsockname()[1], listener.fileno())
