"""Asking a shared fork server for a program: a fork of a process that has loaded it already."""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from forks.request import ForkRequest, ignored_signals, process_attributes, socket_of
from unisono.errors import Unreadable
from unisono.received import is_same_user, parse_json

SHARED_FORK_SERVERS = "SHARED_FORK_SERVERS"
"""The variable that tells where shared fork servers listen: a folder with a socket for each."""

PATIENCE_S = 30.0
"""How long a shared fork server may take to answer. It may still be loading torch, as who asks would have to."""

LONGEST_ANSWER = 64 * 1024

UNKNOWN = 255
"""The exit code of a program whose shared fork server has ended before it."""


class NotForked(Exception):
    """The shared fork server does not help; says why. Who asks starts the program itself."""


class ForkedProcess:
    """A program that a shared fork server has forked; used like an ``asyncio.subprocess.Process``.

    Args:
        pid: its process id.
        channel: the socket on which the shared fork server says how it has ended.

    Raises:
        OSError: there is no such process.
    """

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._itself = os.pidfd_open(pid)
        self._channel = channel
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(channel, self._hear)

    def kill(self) -> None:
        """End it.

        Raises:
            ProcessLookupError: it has ended already.
        """
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end.

        Raises:
            ProcessLookupError: it has ended already.
        """
        self._send(signal.SIGTERM)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        signal.pidfd_send_signal(self._itself, number)

    def _hear(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._channel)
        if (code := code_in(self._channel)) is None:
            loop.add_reader(self._itself, self._end, UNKNOWN)
        else:
            self._end(code)
        self._channel.close()

    def _end(self, code: int) -> None:
        asyncio.get_running_loop().remove_reader(self._itself)
        os.close(self._itself)
        self.returncode = code
        self._ended.set()


async def request_fork(
    command: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]
) -> ForkedProcess:
    """Have a shared fork server fork a program.

    Args:
        command: the module, and its arguments.
        environment: the program's environment, which says where the shared fork servers are.
        descriptors: this process's descriptors, by the numbers that they get in the program.

    Raises:
        NotForked: there is no shared fork server, or its fork would be another one than this process would start.
    """
    channel = asked(command, environment, descriptors)
    channel.setblocking(False)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return ForkedProcess(pid_in(await asyncio.get_running_loop().sock_recv(channel, LONGEST_ANSWER)), channel)
    except (OSError, TimeoutError) as error:
        channel.close()
        raise NotForked(f"the shared fork server does not answer: {error}") from error
    except BaseException:
        channel.close()
        raise


def asked(
    command: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int], cwd: str | None = None
) -> socket.socket:
    """Ask a shared fork server to fork; returns the socket on which it answers, and tells the end of the program.

    Args:
        command: the module, and its arguments.
        environment: the program's environment, which says where the shared fork servers are.
        descriptors: this process's descriptors, by the numbers that they get in the program.
        cwd: the program's working folder, absolute; by default this process's.

    Raises:
        NotForked: there is no shared fork server.
    """
    if SHARED_FORK_SERVERS not in environment:
        raise NotForked("there is no shared fork server")
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        folder = cwd or os.getcwd()  # noqa: PTH109 (as text)
        about = process_attributes(environment, folder)
        request = ForkRequest(dict(environment), about, tuple(command), tuple(descriptors), folder, ignored_signals())
        channel.settimeout(PATIENCE_S)
        _connect(channel, Path(environment[SHARED_FORK_SERVERS], socket_of(command[0])))
        socket.send_fds(channel, [request.to_json()], list(descriptors.values()))
    except OSError as error:
        channel.close()
        raise NotForked(
            f"the shared fork server at {environment[SHARED_FORK_SERVERS]} cannot be asked: {error}"
        ) from error
    except BaseException:
        channel.close()
        raise
    return channel


def _connect(channel: socket.socket, listener: Path) -> None:
    if listener.stat().st_uid != os.getuid():
        raise NotForked(f"{listener} belongs to another user")
    channel.connect(str(listener))
    if not is_same_user(channel):
        raise NotForked(f"a process of another user answers at {listener}")


def pid_in(answer: bytes) -> int:
    """The process id of the program that a shared fork server has forked.

    Raises:
        NotForked: it has not; says why.
    """
    try:
        found = parse_json(answer or b"{}")
    except Unreadable as error:
        raise NotForked(f"the shared fork server's answer cannot be read: {error}") from error
    match found:
        case {"born": int(pid)}:
            return pid
        case {"refused": str(why)}:
            raise NotForked(why)
        case _:
            raise NotForked("the shared fork server has ended")


def code_in(channel: socket.socket) -> int | None:
    """With which exit code the program has ended, negative for a signal; None if nobody can say any more."""
    try:
        said = channel.recv(LONGEST_ANSWER)
    except ConnectionError:
        said = b""
    match parse_json(said or b"{}"):
        case {"ended": int(code)}:
            return code
        case _:
            return None
