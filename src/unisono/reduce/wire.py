"""A connection between two workers, on which tensors travel both ways at the same time."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from select import POLLIN, POLLOUT, poll

import torch
from torch import Tensor, uint8

_HEAD = struct.Struct("<IQ")  # of each tensor: its tag, and its bytes

TOGETHER = 2**14 - _HEAD.size
"""Bytes that travel with their head: one record of TLS."""

PIECE = 2**20
"""Bytes that are given to a connection at once, so that its buffers stay in the cache."""

_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Broken(RuntimeError):
    """A connection to another worker is gone, or brings data that make no sense."""


class Work:
    """A tensor on its way."""

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
        """The descriptor, for a caller that waits for several connections."""
        return self._connection.fileno()

    @property
    def events(self) -> int:
        """The events for which this connection waits."""
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
        """Receive data that have come, as far as somebody expects them.

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
        """Wake all that wait, here and at the other end. Any thread may call it."""
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
        """Take a head: the data that follow go to the caller that expects them."""
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


GATHERED = 2**32 - 1
"""The tag of a row of an all-gather."""

SPREAD = 2**32 - 2
"""The tag of broadcast messages."""

ADDED = 2**32 - 3
"""The tag of a part that another worker adds to the others."""


class SocketWork:
    """Sends and receives under way."""

    __slots__ = ("_group", "_works")

    def __init__(self, group: SocketGroup, works: Sequence[Work]) -> None:
        self._group, self._works = group, works

    def wait(self) -> None:
        """Wait until all are done.

        Raises:
            Broken: a connection is gone.
            RuntimeError: nothing moved for too long: "timed out".
        """
        for work in self._works:
            self._group.move_until(work)


class SocketGroup:
    """The workers of a generation, each connected with each.

    Data move only while a caller waits: there is no thread. A caller that waits moves all that leaves and arrives.

    Args:
        wires: the connections to all other workers, in the order of ranks.
        timeout_s: the longest time in which nothing moves, in seconds.
    """

    def __init__(self, rank: int, wires: Sequence[Wire], timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._wires = {number + (number >= rank): wire for number, wire in enumerate(wires)}
        self._by_descriptor = {wire.fileno(): wire for wire in wires}
        self._poll = poll()
        self._polled = dict.fromkeys(self._by_descriptor, 0)
        self._lock = threading.Lock()
        self._is_over = False

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> SocketWork:
        """Begin to send tensors to another worker."""
        with self._using(self._wires[peer]) as wire:
            return SocketWork(self, [wire.send(tensor, tag) for tensor in tensors])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> SocketWork:
        """Begin to receive tensors from another worker."""
        with self._using(self._wires[peer]) as wire:
            return SocketWork(self, [wire.receive(tensor, tag) for tensor in tensors])

    def allreduce(self, tensors: Sequence[Tensor]) -> SocketWork:
        """Add everybody's tensor up, in place: each worker adds a part, in the order of ranks."""
        (total,) = tensors
        parts = list(total.tensor_split(len(self._wires) + 1))
        mine = parts[self._rank]
        theirs = {peer: torch.empty_like(mine) for peer in self._wires}
        arriving = [self.recv([theirs[peer]], peer, ADDED) for peer in self._wires]
        leaving = [self.send([parts[peer]], peer, ADDED) for peer in self._wires]
        self._all(arriving + leaving).wait()
        rows = [theirs.get(rank, mine) for rank in range(len(parts))]
        mine.copy_(sum(rows[1:], rows[0]))
        arriving = [self.recv([parts[peer]], peer, GATHERED) for peer in self._wires]
        return self._all(arriving + [self.send([mine], peer, GATHERED) for peer in self._wires])

    def _allgather_base(self, rows: Tensor, row: Tensor) -> SocketWork:
        """Begin to gather everybody's row, one behind the other."""
        parts = rows.view(len(self._wires) + 1, -1)
        parts[self._rank].copy_(row)
        arriving = [self.recv([parts[peer]], peer, GATHERED) for peer in self._wires]
        leaving = [self.send([row], peer, GATHERED) for peer in self._wires]
        return self._all(arriving + leaving)

    def broadcast(self, tensor: Tensor, source: int) -> SocketWork:
        """Overwrite a tensor with the one of a worker: along a binomial tree of workers."""
        workers = len(self._wires) + 1
        place = (self._rank - source) % workers  # the source has 0, and place p gets it from p without its highest bit
        below = 1
        if place:
            below = 1 << place.bit_length()
            self.recv([tensor], (place - below // 2 + source) % workers, SPREAD).wait()
        reached = []
        while place + below < workers:
            reached.append((place + below + source) % workers)
            below *= 2
        return self._all([self.send([tensor], peer, SPREAD) for peer in reached])

    def abort(self) -> None:
        """Hang up: all that wait wake, here and on other workers. Any thread may call it."""
        self._is_over = True
        for wire in self._wires.values():
            wire.hang_up()

    def close(self) -> None:
        """Hang up, and give the connections back."""
        self.abort()
        with self._lock:  # nobody waits any more
            for wire in self._wires.values():
                wire.close()

    def move_until(self, work: Work) -> None:
        """Move everything on until this has arrived or left."""
        if work.is_done:
            return
        with self._lock:
            while not work.is_done:
                self._require_open()
                work.wire.require()
                ready = self._poll.poll(self._timeout_s * 1000)
                if not ready:
                    raise RuntimeError(f"timed out after {self._timeout_s:g} s")
                for descriptor, events in ready:
                    wire = self._by_descriptor[descriptor]
                    if events & POLLOUT:
                        wire.push()
                    if events & ~POLLOUT:
                        wire.pull()
                    self._note(wire)

    @contextmanager
    def _using(self, wire: Wire) -> Iterator[Wire]:
        with self._lock:
            self._require_open()
            yield wire
            self._note(wire)

    def _note(self, wire: Wire) -> None:
        """Note that a connection may wait for other events."""
        descriptor, events = wire.fileno(), wire.events
        if events == self._polled[descriptor]:
            return
        if events:
            self._poll.register(descriptor, events)
        else:
            self._poll.unregister(descriptor)
        self._polled[descriptor] = events

    def _require_open(self) -> None:
        if self._is_over:
            raise Broken("this worker hangs up")

    def _all(self, works: Sequence[SocketWork]) -> SocketWork:
        return SocketWork(self, [single for work in works for single in work._works])
