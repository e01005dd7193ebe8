"""The coordinator as a child of an agent, which starts it again whenever it ends before the job does."""

import asyncio
import os
import shlex
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.errors import USAGE, LaunchError
from unisono.host.certificate import Certificate
from unisono.host.guard import Guard, kill_group
from unisono.launch.command import PER_WORKER
from unisono.launch.elastic.elastic import ElasticSettings
from unisono.launch.elastic.entrance import LOOPBACK, certificate_file
from unisono.launch.ending.result import last_lines
from unisono.launch.program import start_program
from unisono.launch.settings import LaunchSettings
from unisono.membership.token import token_file
from unisono.settings.reading import words_of

# What a person types on another host to bring more workers.


def invitation(settings: ElasticSettings, run_dir: Path, url: str) -> list[str]:
    """The lines that say how others join. The token stays in its file: anybody on the host can read a command line.

    Args:
        settings: the settings of the job.
        run_dir: the run folder.
        url: the coordinator's URL.

    Returns:
        the lines; none if no other host can reach the coordinator.
    """
    if settings.entrance.is_local:
        return []
    files = {"token": token_file(run_dir), "certificate": certificate_file(run_dir)}
    copied = " and ".join(str(path) for path in files.values())
    words = ["unisono", "join", url, "-n", str(_room(settings))]
    words += ["--token-file", files["token"].name, "--certificate", files["certificate"].name]
    return [
        f"another host joins with copies of {copied}, made with scp -p (who has the token takes part):",
        f"  {shlex.join([*words, *wishes(settings), *settings.launch.script.argv])}",
    ]


def _room(settings: ElasticSettings) -> int:
    return max(1, settings.workers.largest - settings.launch.workers)


def wishes(settings: ElasticSettings) -> list[str]:
    """Settings that all workers of a job need to have in common, as far as they were given to the launcher."""
    timeout = [] if settings.has_default_timeout else ["--failure-timeout-s", f"{settings.failure_timeout_s:g}"]
    return [*words_of(settings.launch.options, without=("launch", DEVICES)), *timeout]


def job_words(settings: ElasticSettings) -> list[str]:
    """The last words of a command that starts a coordinator or an agent for a job: its options, and the script."""
    timeout = [] if settings.has_default_timeout else ["--failure-timeout-s", f"{settings.failure_timeout_s:g}"]
    return [*words_of(settings.launch.options, without=(DEVICES,)), *timeout, *settings.launch.script.argv]


def devices_words(launch: LaunchSettings) -> list[str]:
    """The option that says how many devices each worker has, if the person has set it."""
    devices = launch.options.communication
    return ["--devices-per-worker", str(launch.devices)] if "devices_per_worker" in devices.said else []


DEVICES = "communication.devices_per_worker"
"""The setting that the coordinator tells those who join."""

BACKLOG = 1024
"""Connections that the kernel keeps for a coordinator that is just being started again."""

MOST_FAILURES = 6
SETTLED_S = 10.0
"""A coordinator that ran this long has begun well: its end is not held against the next one."""

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
SERVER = "unisono.membership.server"
PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Listening:
    """The socket at which a coordinator listens, and under which name.

    Attributes:
        listener: the file descriptor of the socket.
        name: the host name or address that clients are told.
        certificate: the certificate that it shows; None without TLS.
    """

    listener: int
    name: str = LOOPBACK
    certificate: Certificate | None = None

    def url(self, port: int | str) -> str:
        """As clients are told it."""
        host = f"[{self.name}]" if ":" in self.name else self.name
        return f"{'http' if self.certificate is None else 'https'}://{host}:{port}"

    @property
    def options(self) -> dict[str, str]:
        """As the coordinator is told."""
        found = {"--fd": str(self.listener), "--name": self.name}
        if self.certificate is not None:
            found |= {"--tls-cert": str(self.certificate.chain), "--tls-key": str(self.certificate.key)}
        return found


class CoordinatorProcess:
    """Keeps a coordinator running, always at the same address: the agent holds the socket on which it listens.

    Args:
        settings: the settings of the job.
        run_dir: the run folder.
        guard: a process that ends the coordinator if the agent is killed.
        say: a function that shows a line to the person at the terminal.

    Attributes:
        in_use: whether anybody relies on what it knows. Until then each one begins anew, whatever a job that trained in
            this folder earlier has left.

    Raises:
        JobError: it cannot listen where it should, or has no certificate to show there; says what to do.
    """

    def __init__(self, settings: ElasticSettings, run_dir: Path, guard: Guard, say: Callable[[str], None]) -> None:
        self._settings, self._run_dir, self._guard, self._say = settings, run_dir, guard, say
        self._log = run_dir / "logs" / "coordinator.log"
        self.in_use = False
        entrance = settings.entrance
        self._listener = entrance.listen(BACKLOG)
        try:
            self._listening = Listening(self._listener.fileno(), entrance.name(self._listener))
            self._listening = replace(self._listening, certificate=entrance.secured(run_dir, self._listening.name))
        except BaseException:
            self._listener.close()
            raise

    @property
    def url(self) -> str:
        """Where workers and agents reach it."""
        return self._listening.url(self._listener.getsockname()[1])

    @property
    def certificate(self) -> Path | None:
        """What they trust; None without TLS."""
        return None if self._listening.certificate is None else certificate_file(self._run_dir)

    async def keep(self) -> None:
        """Start it, and start it again, until it ends with 0: the job is over. Ends it when it is cancelled.

        Raises:
            LaunchError: it ends again and again, or its settings are refused; quotes its last words.
        """
        failures = 0
        while True:
            began = time.monotonic()
            code = await self._run(fresh=not self.in_use)
            if code == 0:
                return
            failures = 1 if time.monotonic() - began > SETTLED_S else failures + 1
            if failures > MOST_FAILURES or code == USAGE:
                said = "".join(f"\n  | {line}" for line in last_lines(self._log)) or _why_it_says_nothing(self._log)
                raise LaunchError(f"the coordinator ended with exit code {code} (log {self._log}){said}")
            self._say(f"the coordinator ended with exit code {code}, and is started again; training goes on meanwhile")
            await asyncio.sleep(min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S))

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()

    async def _run(self, *, fresh: bool) -> int:
        """One coordinator's life; its exit code."""
        try:
            process = await start_program(
                ("-m", *server_command(self._settings, self._run_dir, self._listening, fresh=fresh)),
                {name: value for name, value in os.environ.items() if name not in PER_WORKER},
                self._log,
                kept=self._listener.fileno(),
            )
        except OSError as error:
            raise LaunchError(f"the coordinator could not be started: {error}") from error
        self._guard.watch(process.pid)
        try:
            return await process.wait()
        finally:
            await _end(process)
            self._guard.forget(process.pid)


def _why_it_says_nothing(log: Path) -> str:
    with suppress(OSError):
        if not os.statvfs(log.parent).f_bavail:
            return f": no room is left on the disk of {log.parent}; make some, and start the job again"
    return ""


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await process.wait()
        kill_group(process.pid)
        await process.wait()


def server_command(settings: ElasticSettings, run_dir: Path, listening: Listening, *, fresh: bool) -> tuple[str, ...]:
    """A coordinator's module, and its arguments.

    Args:
        settings: the settings of the job.
        run_dir: the run folder.
        listening: the socket at which it listens.
        fresh: whether the job begins; else the coordinator goes on where another one ended.
    """
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
