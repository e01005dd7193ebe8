"""The coordinator from the side of an agent: the connection to it, and its process, started again when it ends."""

import asyncio
import os
import shlex
import ssl
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from unisono.errors import USAGE, LaunchError
from unisono.host.certificate import Certificate
from unisono.host.guard import Guard, kill_group
from unisono.launch.command import PER_WORKER
from unisono.launch.elastic.address import Address, distrusted
from unisono.launch.elastic.elastic_settings import LOOPBACK, ElasticSettings, certificate_file
from unisono.launch.outcome import last_lines
from unisono.launch.worker_start import start_program
from unisono.membership.client import AccessDenied, Reconnection, open_connection
from unisono.membership.messages import FromAgent, Probed, Refused, Target, ToAgent, to_agent
from unisono.membership.probe import PATIENCE_S, ProbeListener, data_address, probe, unreached
from unisono.membership.token import OUTDATED, token_file

# Probes, from which the coordinator knows which hosts reach each other.


class Probes:
    """Answers other hosts' probes, and probes them when the coordinator asks for it."""

    def __init__(
        self, agent: str, host: str, coordinator: Address, timeout_s: float, send: Callable[[FromAgent], None]
    ) -> None:
        self._agent, self._host, self._send = agent, host, send
        self._coordinator = urlsplit(coordinator.url).hostname or ""
        self._token, self._patience_s = coordinator.token, min(PATIENCE_S, timeout_s)
        self._answering = ProbeListener(agent, self._token)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """The address at which probes are answered; empty if they are not."""
        return self._answering.address

    async def listen(self, local_address: str) -> None:
        """Answer probes, at the address at which workers listen for workers of other hosts.

        Args:
            local_address: this host's address, as the coordinator sees it.
        """
        await self._answering.listen(data_address(self._coordinator, local_address))

    def probe(self, targets: Sequence[Target]) -> None:
        """Probe hosts, and send the results to the coordinator."""
        task = asyncio.create_task(self._probe(targets))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop answering and probing."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._answering.close()

    async def _probe(self, targets: Sequence[Target]) -> None:
        back = Target(agent=self._agent, host=self._host, address=self.address)
        results = await probe(targets, self._token, self._patience_s, back)
        reached = tuple(agent for agent, why in results.items() if not why)
        self._send(Probed(reached=reached, unreached=unreached(results)))


OPEN_S = 10.0
CLOSE_S = 1.0
PING_S = 20.0
LARGEST = 2**20
"""The most bytes of a message from the coordinator: the ids of a few thousand workers."""


class CoordinatorLine:
    """The agent's connection to the coordinator, opened again whenever it breaks.

    Args:
        address: the coordinator's address.
        greeting: a function that returns the first messages of each connection, given an address of this host: a hello,
            and messages that the coordinator may not have received.
        handle: a function that gets each message except a refusal.
        patience_s: the seconds for which the coordinator may be gone.
    """

    def __init__(
        self,
        address: Address,
        greeting: Callable[[str], Awaitable[Sequence[FromAgent]]],
        handle: Callable[[ToAgent], None],
        patience_s: float,
    ) -> None:
        self._address, self._greeting, self._handle, self._patience_s = address, greeting, handle, patience_s
        self._outgoing: asyncio.Queue[FromAgent] | None = None
        self._connected_at = monotonic()
        self._reconnection = Reconnection(self._dial, self._converse, self._pause)

    def send(self, message: FromAgent) -> None:
        """Send a message. While there is no connection it is dropped: the next greeting has to repeat it."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def keep(self) -> None:
        """Connect, and connect again, until cancelled.

        Raises:
            JobError: the server there does not have the coordinator's certificate.
            LaunchError: the coordinator refuses this agent, or is gone for ``patience_s`` seconds.
        """
        self._connected_at = monotonic()
        try:
            await self._reconnection.keep()
        except AccessDenied as error:
            why = OUTDATED if error.is_outdated else error.__cause__
            raise LaunchError(f"the coordinator at {self._address.url} refuses the token: {why}") from error

    @asynccontextmanager
    async def _dial(self) -> AsyncIterator[ClientConnection]:
        calling = open_connection(
            self._address.url,
            "/agent",
            self._address.token,
            self._address.context,
            open_s=OPEN_S,
            ping_s=min(PING_S, self._patience_s / 4),  # a host that has vanished closes no connection
            close_s=CLOSE_S,
            max_bytes=LARGEST,
        )
        try:
            async with calling as connection:
                self._reconnection.reset_pause()
                yield connection
        except ssl.SSLCertVerificationError as error:
            raise distrusted(self._address, error) from error

    async def _pause(self, seconds: float) -> None:
        if monotonic() - self._connected_at > self._patience_s:
            raise LaunchError(f"no coordinator answered at {self._address.url} for {self._patience_s:g} s")
        await asyncio.sleep(seconds)

    async def _converse(self, connection: ClientConnection) -> None:
        """Send and receive messages until the connection ends."""
        self._outgoing = asyncio.Queue()
        for first_message in await self._greeting(connection.local_address[0]):
            self._outgoing.put_nowait(first_message)
        sending = asyncio.create_task(self._send_all(connection, self._outgoing))
        try:
            async for text in connection:
                message = _read_message(text)
                if isinstance(message, Refused):
                    raise LaunchError(f"the coordinator refuses this agent: {message.reason}")
                self._handle(message)
        finally:
            self._outgoing, self._connected_at = None, monotonic()
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending

    async def _send_all(self, connection: ClientConnection, outgoing: asyncio.Queue[FromAgent]) -> None:
        with suppress(WebSocketException):  # reading from the connection ends then, too
            while True:
                await connection.send((await outgoing.get()).model_dump_json())


def _read_message(text: str | bytes) -> ToAgent:
    try:
        return to_agent.validate_json(text)
    except ValidationError as error:
        raise LaunchError(f"the coordinator sends a message that this version does not know: {error}"[:4096]) from error


# The coordinator as a child of an agent, which starts it again whenever it ends before the job does.


def invitation(settings: ElasticSettings, run_dir: Path, url: str) -> list[str]:
    """The lines that say how another host joins; none if no other host can reach the coordinator.

    The token is given as a file, since every user of the host can read a command line.
    """
    if settings.entrance.is_local:
        return []
    files = {"token": token_file(run_dir), "certificate": certificate_file(run_dir)}
    copied = " and ".join(str(path) for path in files.values())
    words = ["unisono", "join", url, "-n", str(max(1, settings.workers.largest - settings.launch.workers))]
    words += ["--token-file", files["token"].name, "--certificate", files["certificate"].name]
    return [
        f"another host joins with copies of {copied}, made with scp -p (who has the token takes part):",
        f"  {shlex.join([*words, *settings.words('launch')])}",
    ]


BACKLOG = 1024
"""The connections that the kernel keeps while the coordinator is started again."""

MOST_FAILURES = 6
SETTLED_S = 10.0
"""A coordinator that ran this long has begun well: the count of failures in a row begins anew."""

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
SERVER = "unisono.membership.server"
ENDS_IN_S = 5.0


@dataclass(frozen=True, slots=True)
class Listening:
    """The socket at which a coordinator listens, and the name by which clients reach it.

    Attributes:
        listener: the file descriptor of the socket.
        name: the host name or address in the URL.
        certificate: the coordinator's certificate; None without TLS.
    """

    listener: int
    name: str = LOOPBACK
    certificate: Certificate | None = None

    def url(self, port: int | str) -> str:
        """The URL at which clients reach the coordinator."""
        host = f"[{self.name}]" if ":" in self.name else self.name
        return f"{'http' if self.certificate is None else 'https'}://{host}:{port}"

    @property
    def options(self) -> dict[str, str]:
        """The options by which the coordinator gets all of this."""
        options = {"--fd": str(self.listener), "--name": self.name}
        if self.certificate is not None:
            options |= {"--tls-cert": str(self.certificate.chain), "--tls-key": str(self.certificate.key)}
        return options


class CoordinatorProcess:
    """Keeps a coordinator running, always at the same address: the agent holds the socket on which it listens.

    The guard ends it if the agent is killed.

    Attributes:
        in_use: whether an agent or worker relies on the coordinator's state. Until then each coordinator begins with an
            empty state, and ignores that of an earlier job in this folder.

    Raises:
        JobError: it cannot listen at its address, or has no certificate for it; says what to do.
    """

    def __init__(self, settings: ElasticSettings, run_dir: Path, guard: Guard, say: Callable[[str], None]) -> None:
        self._settings, self._run_dir, self._guard, self._say = settings, run_dir, guard, say
        self._log = run_dir / "logs" / "coordinator.log"
        self.in_use = False
        entrance = settings.entrance
        self._listener = entrance.listen(BACKLOG)
        try:
            self._listening = Listening(self._listener.fileno(), entrance.name(self._listener))
            self._listening = replace(
                self._listening, certificate=entrance.certificate_for(run_dir, self._listening.name)
            )
        except BaseException:
            self._listener.close()
            raise

    @property
    def url(self) -> str:
        """The URL at which workers and agents reach it."""
        return self._listening.url(self._listener.getsockname()[1])

    @property
    def certificate(self) -> Path | None:
        """The certificate that they have to trust; None without TLS."""
        return None if self._listening.certificate is None else certificate_file(self._run_dir)

    async def keep(self) -> None:
        """Run the coordinator, again and again until it ends with 0, when the job is over; end it when cancelled.

        Raises:
            LaunchError: it has failed too often, or refuses its settings; quotes its last lines.
        """
        failures = 0
        while True:
            began = time.monotonic()
            code = await self._run(fresh=not self.in_use)
            if code == 0:
                return
            failures = 1 if time.monotonic() - began > SETTLED_S else failures + 1
            if failures > MOST_FAILURES or code == USAGE:
                lines = "".join(f"\n  | {line}" for line in last_lines(self._log)) or _why_log_is_empty(self._log)
                raise LaunchError(f"the coordinator ended with exit code {code} (log {self._log}){lines}")
            self._say(f"the coordinator ended with exit code {code}, and is started again; training goes on meanwhile")
            await asyncio.sleep(min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S))

    def close(self) -> None:
        """Close the socket at which the coordinator listens."""
        self._listener.close()

    async def _run(self, *, fresh: bool) -> int:
        """Run one coordinator process to its end, and return its exit code."""
        try:
            process = await start_program(
                ("-m", *server_command(self._settings, self._run_dir, self._listening, fresh=fresh)),
                {name: value for name, value in os.environ.items() if name not in PER_WORKER},
                self._log,
                inherited=self._listener.fileno(),
            )
        except OSError as error:
            raise LaunchError(f"the coordinator could not be started: {error}") from error
        self._guard.watch(process.pid)
        try:
            return await process.wait()
        finally:
            await _end(process)
            self._guard.forget(process.pid)


def _why_log_is_empty(log: Path) -> str:
    with suppress(OSError):
        if not os.statvfs(log.parent).f_bavail:
            return f": no room is left on the disk of {log.parent}; make some, and start the job again"
    return ""


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDS_IN_S):
                await process.wait()
        kill_group(process.pid)
        await process.wait()


def server_command(settings: ElasticSettings, run_dir: Path, listening: Listening, *, fresh: bool) -> tuple[str, ...]:
    """The module of a coordinator, and its arguments. Unless it is ``fresh``, it reads an earlier one's state."""
    options = {
        "--run-dir": str(run_dir),
        **listening.options,
        "--smallest": str(settings.workers.smallest),
        "--largest": str(settings.workers.largest),
        "--max-restarts": str(settings.max_restarts),
        "--failure-timeout": str(settings.failure_timeout_s),
        "--devices": str(settings.launch.devices),
        **({"--wanted": str(settings.begin_with)} if settings.begin_with is not None else {}),
    }
    flags = [*(["--restart-on-error"] if settings.restart_on_error else []), *(["--fresh"] if fresh else [])]
    words = [word for pair in options.items() for word in pair]
    return (SERVER, *words, *flags)
