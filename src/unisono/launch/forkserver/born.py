"""The launcher's side of a nursery: a template that has loaded torch already when it is asked for."""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import Unreadable
from unisono.jsonl import open_lines
from unisono.launch.forkserver.request import Wish, circumstances, ignored_signals
from unisono.received import parse_json
from unisono.same_user import is_same_user

NURSERY = "UNISONO_NURSERY"
"""The variable that tells launchers where a nursery listens: the path of a socket."""

PATIENCE_S = 30.0
"""How long a nursery may take to answer. It may still be loading torch, and the launcher would take as long."""

LONGEST_ANSWER = 64 * 1024


class Unborn(Exception):
    """The nursery does not help; says why. The launcher starts the template itself."""


class Born:
    """A template that a nursery has forked; to its launcher like an ``asyncio.subprocess.Process``.

    Args:
        pid: its process id.

    Raises:
        OSError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._itself = os.pidfd_open(pid)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._itself, self._note_end)

    def kill(self) -> None:
        """End it.

        Raises:
            ProcessLookupError: it has ended already.
        """
        if self._ended.done():
            raise ProcessLookupError(self.pid)
        signal.pidfd_send_signal(self._itself, signal.SIGKILL)

    async def wait(self) -> None:
        """Until it has ended."""
        await asyncio.shield(self._ended)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._itself)
        os.close(self._itself)
        self._ended.set_result(None)


async def born(environment: Mapping[str, str], log: Path) -> tuple[socket.socket, Born]:
    """Have a nursery fork a template.

    Args:
        environment: of its workers, without what each has for itself; says where the nursery is.
        log: where the template may write what it has to say.

    Returns:
        the socket that leads to the template, and its process.

    Raises:
        Unborn: there is no nursery, or this launcher's workers would be others than its forks.
    """
    if NURSERY not in environment:
        raise Unborn("there is no nursery")
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.setblocking(False)
        wish = Wish(dict(environment), circumstances(environment), os.getcwd(), ignored_signals())  # noqa: PTH109 (as text)
        async with asyncio.timeout(PATIENCE_S):
            return channel, Born(await _ask(channel, environment[NURSERY], wish, log))
    except (OSError, TimeoutError, Unreadable) as error:
        channel.close()
        raise Unborn(f"the nursery at {environment[NURSERY]} does not answer: {error}") from error
    except BaseException:
        channel.close()
        raise


async def _ask(channel: socket.socket, door: str, wish: Wish, log: Path) -> int:
    loop = asyncio.get_running_loop()
    if Path(door).stat().st_uid != os.getuid():
        raise Unborn(f"{door} belongs to another user")
    await loop.sock_connect(channel, door)
    if not is_same_user(channel):
        raise Unborn(f"a process of another user answers at {door}")
    with os.fdopen(open_lines(log), "ab") as output:
        socket.send_fds(channel, [wish.to_json()], [output.fileno()])
    match parse_json(await loop.sock_recv(channel, LONGEST_ANSWER) or "{}"):
        case {"born": int(pid)}:
            return pid
        case {"refused": str(why)}:
            raise Unborn(why)
        case _:
            raise Unborn("the nursery has ended")
