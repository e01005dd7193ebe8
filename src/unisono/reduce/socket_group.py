"""A group of workers over connections of their own, with the calls of a ``torch.distributed`` process group."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from select import POLLOUT, poll

import torch
from torch import Tensor

from unisono.reduce.wire import Broken, Wire, Work

GATHERED = 2**32 - 1
"""The tag of a row of an all-gather."""

SPREAD = 2**32 - 2
"""The tag of what is broadcast."""

ADDED = 2**32 - 3
"""The tag of a part that another worker adds to the others."""


class SocketWork:
    """Sends and receives under way.

    Args:
        group: the group that moves them on.
        works: the sends and receives.
    """

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

    Nothing moves but while somebody waits: there is no thread. Whoever waits moves all, what leaves and what arrives.

    Args:
        rank: this worker's rank.
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
        """Hang up: whoever waits wakes, here and on other workers. From any thread."""
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
        """What a connection waits for may have changed."""
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
        return SocketWork(self, [one for work in works for one in work._works])
