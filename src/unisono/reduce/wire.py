"""One connection between two workers, on which tensors travel both ways without anybody's waiting."""

from __future__ import annotations

import socket
import ssl
import struct
from collections import deque
from contextlib import suppress
from select import POLLIN, POLLOUT

from torch import Tensor, uint8

_HEAD = struct.Struct("<IQ")  # of each tensor: its tag, and its bytes

TOGETHER = 2**14 - _HEAD.size
"""Bytes that travel with their head: one record of TLS."""

PIECE = 2**20
"""Bytes that are given to a connection at once, so that its buffers stay in the cache."""

_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Broken(RuntimeError):
    """A connection to another worker is gone, or what comes over it makes no sense."""


class Work:
    """A tensor on its way.

    Attributes:
        is_done: whether it has left, or has arrived.
        wire: the connection that it takes.
    """

    __slots__ = ("is_done", "wire")

    def __init__(self, wire: Wire) -> None:
        self.is_done = False
        self.wire = wire


class Wire:
    """A connection to another worker, of a kind that never blocks.

    What arrives goes to where it was expected, without a copy: who receives says so first, with a tag. Tensors with one
    tag arrive in the order in which they are sent. What nobody expects yet waits in the kernel.

    Args:
        connection: the connected socket, plain or with TLS; taken over.
        other: the name of the other worker, for messages.
    """

    def __init__(self, connection: socket.socket, other: str) -> None:
        connection.setblocking(False)
        self._connection, self._other = connection, other
        self._leaving: deque[tuple[memoryview, Work | None]] = deque()
        self._expected: dict[int, deque[tuple[memoryview, Work]]] = {}
        self._head = memoryview(bytearray(_HEAD.size))
        self._room = self._head  # what is to be filled next
        self._work: Work | None = None  # whose bytes arrive
        self._unexpected: tuple[int, int] | None = None  # a head that nobody has expected yet
        self._broken = ""

    def fileno(self) -> int:
        """For whoever waits for several of them."""
        return self._connection.fileno()

    @property
    def events(self) -> int:
        """What this connection waits for."""
        reads = bool(self._expected or self._work) and self._unexpected is None
        return (POLLIN if reads else 0) | (POLLOUT if self._leaving else 0)

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Begin to send a contiguous tensor, which stays as it is until it has left."""
        work, data = Work(self), _bytes(tensor)
        head = _HEAD.pack(tag, len(data))
        self._leaving.append((memoryview(head + data[:TOGETHER]), None if len(data) > TOGETHER else work))
        if len(data) > TOGETHER:
            self._leaving.append((data[TOGETHER:], work))
        if len(self._leaving) <= 2:  # nothing else was under way
            self.push()
        return work

    def receive(self, tensor: Tensor, tag: int) -> Work:
        """Expect a tensor of this length; it is written into this one, which is contiguous."""
        work = Work(self)
        self._expected.setdefault(tag, deque()).append((_bytes(tensor), work))
        if self._unexpected is not None and self._unexpected[0] == tag:
            head, self._unexpected = self._unexpected, None
            self._meet(*head)
            self.pull()
        return work

    def push(self) -> None:
        """Send what can leave now.

        Raises:
            Broken: the connection is gone.
        """
        try:
            while self._leaving:
                data, work = self._leaving[0]
                sent = self._connection.send(data[:PIECE])
                if sent < len(data):
                    self._leaving[0] = data[sent:], work
                    continue
                self._leaving.popleft()
                if work is not None:
                    work.is_done = True
        except _LATER:
            pass
        except (OSError, ValueError) as error:
            self._break(error)

    def pull(self) -> None:
        """Receive what has come, as far as somebody expects it.

        Raises:
            Broken: the connection is gone, or something arrives that nobody expects.
        """
        try:
            while self._unexpected is None and (self._expected or self._work):
                count = self._connection.recv_into(self._room[:PIECE])
                if not count:
                    raise EOFError("its end is closed")
                self._room = self._room[count:]
                if not self._room:
                    self._filled()
        except _LATER:
            pass
        except (OSError, EOFError, ValueError) as error:
            self._break(error)

    def require(self) -> None:
        """Refuse a connection that is gone.

        Raises:
            Broken: it is.
        """
        if self._broken:
            raise Broken(self._broken)

    def hang_up(self) -> None:
        """Wake whoever waits, here and at the other end. From any thread."""
        with suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # TLS says nothing more, and needs no other end

    def close(self) -> None:
        """Give the connection back."""
        self._connection.close()

    def _filled(self) -> None:
        if self._work is None:
            self._meet(*_HEAD.unpack(self._head))
        else:
            self._arrived(self._work)

    def _meet(self, tag: int, size: int) -> None:
        """A head has come: what follows goes to who expects it."""
        waiting = self._expected.get(tag)
        if not waiting:
            self._unexpected = tag, size
            return
        room, work = waiting.popleft()
        if not waiting:
            del self._expected[tag]
        if len(room) != size:
            raise ValueError(f"it sends {size} bytes as number {tag}, where {len(room)} are expected")
        self._room, self._work = room, work
        if not size:
            self._arrived(work)

    def _arrived(self, work: Work) -> None:
        work.is_done = True
        self._work, self._room = None, self._head

    def _break(self, error: Exception) -> None:
        self._broken = f"the connection to {self._other} is broken: {error}"
        raise Broken(self._broken) from error


def _bytes(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous(), "it would be a copy of it that travels"
    return tensor.detach().reshape(-1).view(uint8).numpy().data
