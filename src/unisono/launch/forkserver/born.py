"""Asking a nursery for a program: a fork of a process that has loaded it already."""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.errors import Unreadable
from unisono.host.same_user import is_same_user
from unisono.launch.forkserver.request import Wish, circumstances, door_of, ignored_signals
from unisono.received import parse_json

NURSERY = "UNISONO_NURSERY"
"""The variable that tells where nurseries listen: a folder with a socket for each."""

PATIENCE_S = 30.0
"""How long a nursery may take to answer. It may still be loading torch, and who asks would take as long."""

LONGEST_ANSWER = 64 * 1024

UNKNOWN = 255
"""The exit code of a program whose nursery has ended before it."""


class Unborn(Exception):
    """The nursery does not help; says why. Who asks starts the program itself."""


class Born:
    """A program that a nursery has forked; to who asked like an ``asyncio.subprocess.Process``.

    Args:
        pid: its process id.
        channel: where the nursery says how it has ended.

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


async def born(command: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> Born:
    """Have a nursery fork a program.

    Args:
        command: the module, and its arguments.
        environment: of the program; says where the nurseries are.
        descriptors: for each number that the program has, that of this process.

    Raises:
        Unborn: there is no nursery, or its fork would be another one than this process would start.
    """
    channel = asked(command, environment, descriptors)
    channel.setblocking(False)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return Born(pid_in(await asyncio.get_running_loop().sock_recv(channel, LONGEST_ANSWER)), channel)
    except (OSError, TimeoutError) as error:
        channel.close()
        raise Unborn(f"the nursery does not answer: {error}") from error
    except BaseException:
        channel.close()
        raise


def asked(
    command: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int], cwd: str | None = None
) -> socket.socket:
    """Ask a nursery, as ``born`` does; where it will answer, and say how the program ends.

    Args:
        command: the module, and its arguments.
        environment: of the program; says where the nurseries are.
        descriptors: for each number that the program has, that of this process.
        cwd: its working folder, absolute; by default that of this process.

    Raises:
        Unborn: there is no nursery.
    """
    if NURSERY not in environment:
        raise Unborn("there is no nursery")
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        folder = cwd or os.getcwd()  # noqa: PTH109 (as text)
        about = circumstances(environment, folder)
        wish = Wish(dict(environment), about, tuple(command), tuple(descriptors), folder, ignored_signals())
        channel.settimeout(PATIENCE_S)
        _connect(channel, Path(environment[NURSERY], door_of(command[0])))
        socket.send_fds(channel, [wish.to_json()], list(descriptors.values()))
    except OSError as error:
        channel.close()
        raise Unborn(f"the nursery at {environment[NURSERY]} cannot be asked: {error}") from error
    except BaseException:
        channel.close()
        raise
    return channel


def _connect(channel: socket.socket, door: Path) -> None:
    if door.stat().st_uid != os.getuid():
        raise Unborn(f"{door} belongs to another user")
    channel.connect(str(door))
    if not is_same_user(channel):
        raise Unborn(f"a process of another user answers at {door}")


def pid_in(answer: bytes) -> int:
    """The process id of the program that a nursery has forked.

    Raises:
        Unborn: it has not; says why.
    """
    try:
        found = parse_json(answer or b"{}")
    except Unreadable as error:
        raise Unborn(f"the nursery's answer cannot be read: {error}") from error
    match found:
        case {"born": int(pid)}:
            return pid
        case {"refused": str(why)}:
            raise Unborn(why)
        case _:
            raise Unborn("the nursery has ended")


def code_in(channel: socket.socket) -> int | None:
    """With which exit code the program has ended, negative for a signal; None if the nursery has ended before it."""
    try:
        said = channel.recv(LONGEST_ANSWER)
    except ConnectionError:
        said = b""
    match parse_json(said or b"{}"):
        case {"ended": int(code)}:
            return code
        case _:
            return None
