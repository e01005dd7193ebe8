"""Starting workers: forked from the fork server where that can be, else each as a program of its own."""

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


async def start_program(words: Sequence[str], environment: Mapping[str, str], log: Path, kept: int) -> Process:
    """Start Python in a session of its own, with an empty standard input; it inherits ``kept``, under the same number.

    Raises:
        OSError: it cannot be started.
    """
    with os.fdopen(open_lines(log), "ab", 0) as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # no module of the working folder is in its way
            *words,
            env=environment,
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[kept],
        )


# What a launcher asks of the fork server: one worker.

FIRST_KEPT = 3
"""The number that a descriptor has in the worker, if one comes behind those of its output and its errors."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A worker that is asked for. The descriptors of its output and errors travel beside it, and maybe a third.

    Attributes:
        argv: the script and its arguments, as ``unisono.launch.worker`` takes them.
        variables: what it gets on top of the fork server's own environment.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    cwd: str

    def to_json(self) -> bytes:
        """The JSON that travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "WorkerRequest":
        """The inverse of ``to_json``.

        Raises:
            Unreadable: it is none.
        """
        request: WorkerRequest = value_of(cls, parse_json(data), "the request")
        return request


# The launcher's side of the fork server: workers that begin at once, instead of loading torch first.

FORK_SERVER = "unisono.launch.fork_server"
LONGEST_ANSWER = 64 * 1024


class ColdStart(Exception):
    """The fork server cannot start a worker; says why. The launcher starts it as a program of its own."""


@dataclass(eq=False, slots=True)
class WarmWorker:
    """A forked worker; to its launcher like an ``asyncio.subprocess.Process``."""

    pid: int
    _ended: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""
        return await asyncio.shield(self._ended)  # whoever stops waiting must not cancel it for the others

    def end(self, code: int) -> None:
        """Note that it has ended."""
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
        self._turn = asyncio.Lock()  # one request at a time: the socket has room for few
        asyncio.get_running_loop().add_reader(channel, self._hear)

    @classmethod
    async def open(cls, environment: Mapping[str, str], log: Path) -> "WarmStart":
        """Start a fork server. It loads torch while the caller goes on.

        The environment is that of its workers, without the variables that differ between them.

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
        """Have a worker forked. ``out`` and ``err`` stay open here; at most one of ``kept`` becomes ``FIRST_KEPT``.

        Raises:
            ColdStart: the fork server did not fork it.
        """
        await self.ready()
        async with self._turn:
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
    variables = {**environment, "UNISONO_LAUNCHER_PID": str(os.getpid())}
    try:
        with theirs:
            number = theirs.fileno()
            return ours, await start_program(("-u", "-m", FORK_SERVER, str(number)), variables, log, kept=number)
    except OSError as error:
        ours.close()
        raise ColdStart(str(error)) from error


STORE_FD = "UNISONO_STORE_FD"
"""The variable that names the socket at which workers meet; the first of them inherits it."""


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

    Without a log they have no fork server of their own; a shared one serves other launchers, too.
    """

    def __init__(
        self, common: WorkerCommand, log: Path | None, say: Callable[[str], None], shared: WarmStart | None = None
    ) -> None:
        self._common, self._log, self._say = common, log, say
        self._warm, self._is_shared = shared, shared is not None
        self._is_cold = shared is None and log is None
        self._closed = False

    async def open(self) -> None:
        """Begin to load what warm workers have loaded, while the caller goes on."""
        if self._log is None or self._warm is not None:
            return
        try:
            self._warm = await WarmStart.open(self._common.environment(os.environ), self._log)
        except ColdStart as why:
            self._go_cold(why)

    async def loaded(self, unwanted: asyncio.Event) -> None:
        """Wait until workers begin at once, or it is clear that they will not, or nobody wants them any more."""
        if self._warm is not None:
            waits = [asyncio.create_task(self._warm.ready()), asyncio.create_task(unwanted.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)  # a cold start is said when a worker is started

    async def start(self, command: WorkerCommand, output: WorkerOutput) -> WorkerProcess:
        """Start a worker, as the leader of a process group of its own.

        Raises:
            OSError: it cannot be started.
        """
        socket_ = command.variables.get(STORE_FD)
        inherited = () if socket_ is None else (int(socket_),)
        if self._warm is not None and not self._is_cold:
            try:
                own = {STORE_FD: str(FIRST_KEPT)} if inherited else {}
                request = WorkerRequest(command.script, {**command.variables, **own}, os.getcwd())  # noqa: PTH109 (as text)
                return await self._warm.start(request, output.out.writing, output.err.writing, *inherited)
            except ColdStart as why:
                self._go_cold(why)
        if self._closed:
            raise OSError("the launcher ends")
        return await asyncio.create_subprocess_exec(
            *command.argv,
            env=command.environment(os.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.out.writing,
            stderr=output.err.writing,
            start_new_session=True,
            pass_fds=inherited,
        )

    def wake(self) -> None:
        """Workers are about to be ended: whoever says that they have must not stand still."""
        if self._warm is not None:
            self._warm.wake()

    async def close(self) -> None:
        """End the fork server, unless it is shared, and with it the workers that it has forked. No more are started."""
        self._closed = True
        if self._warm is not None and not self._is_shared:
            await self._warm.close()

    def _go_cold(self, why: ColdStart) -> None:
        # The fork server stays: the workers that it has forked would end with it.
        if not self._is_cold and not self._closed:
            self._is_cold = True
            self._say(f"workers begin by loading torch from now on: {why}")


@contextmanager
def listening(processes: int) -> Iterator[RendezvousSocket | None]:
    """A socket on loopback, at a port that the system chooses, open before any of those who meet there looks for it.

    Args:
        processes: the number of those who meet; one alone meets nobody.
    """
    if processes == 1:
        yield None
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(processes * 2 + 128)
        yield RendezvousSocket(listener.getsockname()[1], listener.fileno())
