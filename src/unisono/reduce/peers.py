"""Sockets between the workers of one host: small messages, file descriptors, and the news that a peer is gone."""

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol

from unisono.errors import NoProgress, WorkerLost

LARGEST_MESSAGE = 32 * 1024
"""Bytes that always fit into a socket's buffer, so that everybody may send before anybody receives."""

_HEADER = struct.Struct("<I")
_HELLO = struct.Struct("<i")
_CREDENTIALS = struct.Struct("3i")


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
        framed = _HEADER.pack(len(message)) + message
        for rank, peer in self._sockets.items():
            with self._watching(rank):
                peer.sendall(framed)
        return {self.rank: message} | {rank: self._receive(rank) for rank in self.ranks}

    def exchange_descriptors(self, descriptor: int) -> dict[int, int]:
        """Give everybody an open file, and receive everybody's: new descriptors, by rank."""
        for rank, peer in self._sockets.items():
            with self._watching(rank):
                socket.send_fds(peer, [b"f"], [descriptor])
        return {rank: self._receive_descriptor(rank) for rank in self.ranks}

    def close(self) -> None:
        """Hang up: whoever waits for this worker wakes."""
        for peer in self._sockets.values():
            with suppress(OSError):  # a peer that is gone
                peer.shutdown(socket.SHUT_RDWR)  # wakes a thread of this process, too
            peer.close()
        self._sockets = {}

    def _receive(self, rank: int) -> bytes:
        (length,) = _HEADER.unpack(self._exactly(rank, _HEADER.size))
        return self._exactly(rank, length) if length else b""

    def _exactly(self, rank: int, count: int) -> bytes:
        data = b""
        while len(data) < count:  # a socket with a timeout gives what is there
            with self._watching(rank):
                part = self._sockets[rank].recv(count - len(data))
            if not part:
                raise self._lost(rank)
            data += part
        return data

    def _receive_descriptor(self, rank: int) -> int:
        with self._watching(rank):
            _, descriptors, _, _ = socket.recv_fds(self._sockets[rank], 1, 1)
        if not descriptors:
            raise self._lost(rank)
        return descriptors[0]

    @contextmanager
    def _watching(self, rank: int) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise NoProgress(
                f"rank {self.rank} waited for rank {rank} in vain. It hangs, or takes longer for something than the "
                f"others: see its log, or allow more with unisono.init(failure_timeout_s=…)"
            ) from error
        except OSError as error:
            raise self._lost(rank) from error

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
        door = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
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
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.settimeout(timeout_s)
    caller.connect(address)
    caller.sendall(_HELLO.pack(rank))
    return caller


def _answer(door: socket.socket, timeout_s: float) -> tuple[int, socket.socket]:
    while True:
        caller, _ = door.accept()
        caller.settimeout(timeout_s)
        _, user, _ = _CREDENTIALS.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        said = caller.recv(_HELLO.size) if user == os.getuid() else b""
        if len(said) == _HELLO.size:
            return _HELLO.unpack(said)[0], caller
        caller.close()
