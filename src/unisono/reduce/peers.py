"""Sockets between the workers of one host: small messages, file descriptors, and the news that a peer is gone."""

import os
import secrets
import socket
import struct
from contextlib import ExitStack, suppress
from typing import Protocol

from unisono.errors import NoProgress, WorkerLost

LARGEST_MESSAGE = 32 * 1024
"""Bytes that always fit into a socket's buffer, so that everybody may send before anybody receives."""

_MARK = b"m"
"""Before every message: an empty one would look like the end of the connection."""

_HELLO = struct.Struct("<i")
_CREDENTIALS = struct.Struct("3i")
_TIME = struct.Struct("ll")  # a timeval


class Peers:
    """One connected socket to every other worker of this host.

    A receiver blocks in the kernel: it takes no processor time, and wakes at once when the peer sends or dies.

    Args:
        rank: of this worker.
        sockets: to the others, by rank.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self.rank = rank
        self._sockets = sockets

    @property
    def ranks(self) -> list[int]:
        """The other workers."""
        return sorted(self._sockets)

    def exchange(self, message: bytes) -> dict[int, bytes]:
        """Send a message to everybody and receive everybody's.

        Args:
            message: at most ``LARGEST_MESSAGE`` bytes.

        Returns:
            everybody's message by rank, this worker's own among them.

        Raises:
            WorkerLost: a peer is gone.
            NoProgress: a peer gave no sign in time.
        """
        assert len(message) <= LARGEST_MESSAGE
        marked = _MARK + message
        for rank, peer in self._sockets.items():
            try:
                peer.send(marked)
            except OSError as error:
                raise self._failure(rank, error) from error
        return {self.rank: message} | {rank: self._receive(rank) for rank in self.ranks}

    def exchange_descriptors(self, descriptor: int) -> dict[int, int]:
        """Give everybody an open file, and receive everybody's: new descriptors, by rank."""
        for rank, peer in self._sockets.items():
            try:
                socket.send_fds(peer, [_MARK], [descriptor])
            except OSError as error:
                raise self._failure(rank, error) from error
        return {rank: self._receive_descriptor(rank) for rank in self.ranks}

    def close(self) -> None:
        """Hang up: whoever waits for this worker wakes."""
        for peer in self._sockets.values():
            with suppress(OSError):  # a peer that is gone
                peer.shutdown(socket.SHUT_RDWR)  # wakes a thread of this process, too
            peer.close()

    def _receive(self, rank: int) -> bytes:
        try:
            message = self._sockets[rank].recv(len(_MARK) + LARGEST_MESSAGE)
        except OSError as error:
            raise self._failure(rank, error) from error
        if not message:
            raise self._lost(rank)
        return message[len(_MARK) :]

    def _receive_descriptor(self, rank: int) -> int:
        try:
            _, descriptors, _, _ = socket.recv_fds(self._sockets[rank], len(_MARK), 1)
        except OSError as error:
            raise self._failure(rank, error) from error
        if not descriptors:
            raise self._lost(rank)
        return descriptors[0]

    def _failure(self, rank: int, error: OSError) -> WorkerLost:
        if not isinstance(error, BlockingIOError):
            return self._lost(rank)
        return NoProgress(
            f"rank {self.rank} waited for rank {rank} in vain. It hangs, or takes longer for something than the "
            f"others: see its log, or allow more with unisono.init(failure_timeout_s=…)"
        )

    def _lost(self, rank: int) -> WorkerLost:
        return WorkerLost(f"rank {self.rank} lost rank {rank}: its end of the connection is closed. See its log")


def meet(rank: int, workers: int, board: "Board", timeout_s: float) -> Peers:
    """Connect every worker of this host with every other.

    Each worker listens on a socket without a name in the file system and posts its address; it calls those of lower
    rank and is called by those of higher rank. Callers of another user are turned away.

    Args:
        rank: of this worker.
        workers: how many there are.
        board: where addresses are posted.
        timeout_s: how long to wait for a peer, now and in every exchange.

    Raises:
        WorkerLost: a peer is gone.
        NoProgress: a peer did not appear in time.
    """
    sockets: dict[int, socket.socket] = {}
    with ExitStack() as opened:
        door = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        door.settimeout(timeout_s)
        door.bind(f"\0unisono-{secrets.token_hex(16)}")
        door.listen(workers)
        board.post(f"peer/{rank}", door.getsockname())
        calls = ExitStack()
        with calls:
            for other in range(rank):
                sockets[other] = calls.enter_context(_call(board.read(f"peer/{other}"), rank, timeout_s))
            while len(sockets) < workers - 1:
                other, caller = _answer(door, timeout_s)
                sockets[other] = calls.enter_context(caller)
            calls.pop_all()
    return Peers(rank, sockets)


class Board(Protocol):
    """Where workers post what the others need to find them."""

    def post(self, name: str, value: bytes) -> None:
        """Make a value known."""

    def read(self, name: str) -> bytes:
        """A value, as soon as somebody has posted it."""


def _call(address: bytes, rank: int, timeout_s: float) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _limit(caller, timeout_s)
    caller.connect(address)
    caller.send(_HELLO.pack(rank))
    return caller


def _answer(door: socket.socket, timeout_s: float) -> tuple[int, socket.socket]:
    while True:
        caller, _ = door.accept()
        _limit(caller, timeout_s)
        _, user, _ = _CREDENTIALS.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        said = caller.recv(_HELLO.size) if user == os.getuid() else b""
        if len(said) == _HELLO.size:
            return _HELLO.unpack(said)[0], caller
        caller.close()


def _limit(connection: socket.socket, timeout_s: float) -> None:
    # The kernel's own limit: Python's would cost a system call more for every message.
    connection.settimeout(None)
    whole = int(timeout_s)
    limit = _TIME.pack(whole, max(1, int((timeout_s - whole) * 1e6)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
