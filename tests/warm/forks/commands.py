"""``unisono`` commands as processes, forked by a shared fork server if there is one."""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from forks.client import (
    LONGEST_ANSWER,
    SHARED_FORK_SERVERS,
    UNKNOWN,
    NotForked,
    asked,
    code_in,
    pid_in,
)
from forks.request import cold_command
from forks.starts import replaced
from unisono.launch.command import elastic_command
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.tuning import Tuning

Output = IO[bytes] | IO[str] | int | None
"""Where a program writes, as ``subprocess.Popen`` takes it; but no pipe is made."""


class ForkedCommand:
    """A command that a shared fork server has forked; like a ``subprocess.Popen``. Use :func:`start`.

    Args:
        args: its command line.
        pid: its process id.
        channel: the socket on which the shared fork server says how it has ended.

    Attributes:
        returncode: its exit code, negative for a signal, once ``poll`` or ``wait`` has found that it has ended; 255 if
            its shared fork server has ended before it.
    """

    def __init__(self, args: list[str], pid: int, channel: socket.socket) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None
        self._itself = os.pidfd_open(pid)
        self._channel = channel

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        Args:
            timeout: seconds.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                signal.pidfd_send_signal(self._itself, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.wait()

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and _is_ready(self._channel, timeout):
            code = code_in(self._channel)
            if code is None and _is_ready(self._itself, timeout):
                code = UNKNOWN
            if code is not None:
                self._channel.close()
                os.close(self._itself)
                self.returncode = code
        return self.returncode


def start(
    *words: str,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Output = None,
    stderr: Output = None,
) -> "ForkedCommand | subprocess.Popen[bytes]":
    """Start ``unisono WORDS``, in a session of its own, with nothing to read. In ``warm_jobs`` it loads nothing first.

    Args:
        words: the command, and its arguments.
        cwd: its working folder; by default this process's.
        env: its environment variables; by default this process's.
        stdout: the place for its output: a file, a descriptor, or DEVNULL; by default this process's.
        stderr: the place for its errors, likewise; or STDOUT.

    Returns:
        the process. One that a shared fork server has forked is no child of this process, and has no ``communicate``.

    Raises:
        OSError: it cannot be started.
    """
    command, environment = ("unisono", *words), os.environ if env is None else env
    with open(os.devnull, "r+b", buffering=0) as nothing:  # noqa: PTH123 (no path)
        out = _number(stdout, 1, nothing)
        err = out if stderr == subprocess.STDOUT else _number(stderr, 2, nothing)
        try:
            return _forked(command, environment, {0: nothing.fileno(), 1: out, 2: err}, cwd)
        except NotForked:
            return subprocess.Popen(
                cold_command(command),
                cwd=cwd,
                env=environment,
                stdin=nothing,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )


def _forked(
    command: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int], cwd: str | Path | None
) -> ForkedCommand:
    channel = asked(command, environment, descriptors, None if cwd is None else str(Path(cwd).absolute()))
    try:
        return ForkedCommand(cold_command(command), pid_in(channel.recv(LONGEST_ANSWER)), channel)
    except OSError as error:
        channel.close()
        raise NotForked(f"the shared fork server does not answer: {error}") from error
    except BaseException:
        channel.close()
        raise


def _number(output: Output, own: int, nothing: IO[bytes]) -> int:
    """The descriptor that is meant."""
    if output is None:
        return own
    if output == subprocess.DEVNULL:
        return nothing.fileno()
    return output if isinstance(output, int) else output.fileno()


def _is_ready(source: socket.socket | int, timeout: float | None) -> bool:
    """Whether there is something to hear; waits for it for so many seconds, or for as long as it takes."""
    ready = select.poll()
    ready.register(source, select.POLLIN)
    return bool(ready.poll(None if timeout is None else timeout * 1000))


# Many jobs, one after the other or beside each other, that load what they need once.

ON_PATH = Path(__file__).parents[1]
"""The folder with this package, and with what has Python replace how launchers start programs."""

WAITING = 128
"""Jobs that may ask at the same time."""


@contextmanager
def warm_jobs(varying: Collection[str] = ()) -> Iterator[None]:
    """As long as the context lasts, jobs that are started from this process fork their workers from one that has torch.

    They fork their coordinators, too, from one that has loaded those; and :func:`start` forks launchers. A job whose
    workers would differ from such forks in more than their script loads torch for itself: one with other variables,
    threads, tuning, limits, rights or priority, or in other namespaces. ``logs/template.log`` in its run folder then
    says why, and ``logs/coordinator.log`` of its coordinator. One worker alone (``-n 1`` without ``--max-restarts``) is
    a program of its own, as always. Where no forks can be trusted (on all but Linux), nothing changes.

    Args:
        varying: variables in which jobs may differ all the same, since nothing reads them while torch is loaded. Those
            whose names begin with ``UNISONO_``, and those that shells set (``PWD``), always may.
    """
    if sys.platform != "linux":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="unisono-fork-server-") as name, ExitStack() as opened:
        folder = Path(name)
        opened.enter_context(_told(folder))
        opened.enter_context(_shared_fork_server("torch", folder, _of_workers(folder), varying))
        opened.enter_context(_shared_fork_server("commands", folder, os.environ, varying))
        yield


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """This process, and all that it starts, ask the shared fork servers at a folder."""
    before = {name: os.environ.get(name) for name in (SHARED_FORK_SERVERS, "PYTHONPATH")}
    path = filter(None, (str(ON_PATH), before["PYTHONPATH"]))
    os.environ |= {SHARED_FORK_SERVERS: str(folder), "PYTHONPATH": os.pathsep.join(path)}
    try:
        with replaced():
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _shared_fork_server(
    name: str, folder: Path, environment: Mapping[str, str], varying: Collection[str]
) -> Iterator[None]:
    """One shared fork server, which listens at the socket of its name in a folder that only this user enters."""
    unbuffered = ["-u"] if name == "torch" else []  # as what it forks would be started
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / name))
        listener.listen(WAITING)
        module = "forks.shared_server"
        process = subprocess.Popen(
            [sys.executable, "-P", *unbuffered, "-m", module, name, str(listener.fileno()), *varying],
            env={**environment, "UNISONO_LAUNCHER_PID": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )
    try:  # the socket is closed here, so that who asks hears of the shared fork server's end
        yield
    finally:
        process.kill()
        process.wait()


def _of_workers(folder: Path) -> dict[str, str]:
    """The environment of the workers of a job that is started without further options."""
    settings = LaunchSettings(Script(""), tuning=Tuning.of_this_process())
    return elastic_command(settings, folder, None).environment(os.environ)
