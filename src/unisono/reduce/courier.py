"""Messages between two workers at a time: one asks, and the other answers on a thread of its own."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import torch
from torch import Tensor

from unisono.errors import NoProgress, UnisonoError, WorkerLost
from unisono.reduce.packing import NOTHING
from unisono.reduce.peers import MOST_CALLERS, limit
from unisono.reduce.traffic import Traffic

LARGEST_HEADER = 2**20
"""Bytes of what is said besides the tensors."""

Gather = Callable[[Any], list[Any]]
"""Every worker's JSON value, by rank. Collective."""


@dataclass(frozen=True, slots=True)
class Letter:
    """What one worker says to another.

    Attributes:
        said: JSON values by name.
        packed: tensors as bytes, see :func:`unisono.reduce.packing.pack`: uint8, 1-D.
    """

    said: Mapping[str, Any] = field(default_factory=dict)
    packed: Tensor = NOTHING


Answer = Callable[[int, Letter], Letter]
"""What a worker answers the one of that rank. Called on several threads, one for each of the others."""


class Courier:
    """Carries letters. A worker waits for the answers to what it asked; it is asked by any number of others meanwhile.

    Connections belong to this generation alone, and whoever calls shows the secret of the one who is called. When one
    is closed, all of this worker's are, so that whoever waits for anybody wakes.

    Args:
        rank: of this worker.
        host: where others reach this worker; empty if all of them are on one host.
        answer: what to say when asked.
        traffic: counts what is sent.
        timeout_s: how long to wait for another worker, whether it is to listen or to speak.
        called: how to speak of the worker of a rank.

    Attributes:
        ends: called when the connections are closed, from whichever side; from any thread.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        answer: Answer,
        traffic: Traffic,
        timeout_s: float,
        called: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.ends: Callable[[], None] = lambda: None
        self._rank, self._answer, self._traffic, self._timeout_s = rank, answer, traffic, timeout_s
        self._called = called
        self._calls: dict[int, _Line] = {}
        self._lines: list[_Line] = []
        self._lock, self._is_closed = threading.Lock(), False
        self._secret = secrets.token_hex(32)
        # So many may call before one is let in: a call to a worker that hangs is not held up, and wakes at a hang-up.
        self._listener = Listener((host, 0) if host else f"\0unisono-{secrets.token_hex(16)}", backlog=MOST_CALLERS)
        self._door: socket.socket = self._listener._listener._socket  # type: ignore[attr-defined]
        self._answering = [self._thread(self._welcome)]

    def meet(self, gather: Gather) -> None:
        """Call everybody, before anybody is asked. Collective. If it fails, close.

        Args:
            gather: tells every worker what each of them says.

        Raises:
            WorkerLost: another worker is gone.
            NoProgress: one did not answer the call in time.
        """
        address = self._listener.address
        named = address.decode("ascii") if isinstance(address, bytes) else address
        for rank, (address, secret) in enumerate(gather([named, self._secret])):
            if rank != self._rank:
                with self._talking_to(rank):
                    self._calls[rank] = self._call(address, secret)
        gather(None)  # all have called everybody

    def ask(self, questions: Mapping[int, Letter]) -> dict[int, Letter]:
        """Ask some workers at once, and wait for all answers.

        Returns:
            the answers, by rank.

        Raises:
            WorkerLost: a worker is gone.
            NoProgress: one gave no answer in time.
            UnisonoError: one could not answer; says why.
        """
        answers: dict[int, Letter] = {}
        for rank, letter in questions.items():
            with self._talking_to(rank):
                self._send(self._calls[rank], letter)
        for rank in questions:
            with self._talking_to(rank):
                answers[rank] = self._calls[rank].receive()
        for rank, letter in answers.items():
            if "in vain" in letter.said:
                self.abort()
                raise NoProgress(letter.said["in vain"])
            if "error" in letter.said:
                raise UnisonoError(f"rank {rank} could not answer rank {self._rank}: {letter.said['error']}")
        return answers

    def abort(self) -> None:
        """Hang up on everybody: whoever waits, here or there, wakes. From any thread."""
        with self._lock:
            self._is_closed = True
            for line in self._lines:
                line.hang_up()
        self.ends()
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and wait until nobody is answered any more."""
        self.abort()
        for thread in self._answering:  # the first one, which adds others, ends first
            thread.join()
        self._listener.close()
        with self._lock:
            for line in self._lines:
                line.close()
            self._lines.clear()

    def _call(self, address: Any, secret: str) -> _Line:
        is_here = isinstance(address, str)
        with socket.socket(socket.AF_UNIX if is_here else socket.AF_INET) as caller:
            limit(caller, self._timeout_s)
            caller.connect(address if is_here else tuple(address))
            line = self._opened(Connection(caller.detach()))
        answer_challenge(line.connection, secret.encode())
        self._send(line, Letter({"rank": self._rank}))
        return line

    @contextmanager
    def _talking_to(self, rank: int) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            self.abort()
            raise NoProgress(
                f"{self._called(self._rank)} waited for {self._called(rank)} in vain. It hangs, waits for somebody "
                f"else, or takes longer for something than the others: see its log, or allow more with "
                f"unisono.init(failure_timeout_s=…)"
            ) from error
        except (OSError, EOFError, AuthenticationError) as error:
            self.abort()
            raise WorkerLost(f"rank {self._rank} lost its connection to another worker: {error!r}") from error

    def _welcome(self) -> None:
        """On a thread: whoever calls is answered on another."""
        while not self._is_closed:
            try:
                line = self._opened(self._listener.accept())
            except OSError:  # this worker hangs up
                return
            self._answering.append(self._thread(self._serve, line))

    def _serve(self, line: _Line) -> None:
        """On a thread: answer one worker as long as it asks."""
        try:
            deliver_challenge(line.connection, self._secret.encode())
            rank = int(line.receive().said["rank"])
        except (OSError, EOFError, AuthenticationError, ValueError, KeyError):  # none of these workers
            line.hang_up()
            return
        with suppress(OSError, EOFError):
            while True:
                letter = line.receive()
                try:
                    answer = self._answer(rank, letter)
                except NoProgress as error:
                    answer = Letter({"in vain": str(error)})
                except WorkerLost:
                    break
                except Exception as error:  # noqa: BLE001 (the one who asked raises it)
                    answer = Letter({"error": f"{type(error).__name__}: {error}"})
                self._send(line, answer)
        self.abort()

    def _send(self, line: _Line, letter: Letter) -> None:
        self._traffic.count(line.send(letter), 1)

    def _opened(self, connection: Any) -> _Line:
        line = _Line(connection)
        with self._lock:
            self._lines.append(line)
            if self._is_closed:
                line.hang_up()
        return line

    def _thread(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="unisono-courier", daemon=True)
        thread.start()
        return thread


class _Line:
    """One connection, and the plug to pull from another thread."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._plug = socket.socket(fileno=socket.dup(connection.fileno()))
        if self._plug.family != socket.AF_UNIX:
            self._plug.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, letter: Letter) -> int:
        """Send; returns the number of bytes."""
        header = json.dumps([dict(letter.said), letter.packed.numel()]).encode()
        self.connection.send_bytes(header)
        if letter.packed.numel():
            self.connection.send_bytes(letter.packed.numpy().data)
        return len(header) + letter.packed.numel()

    def receive(self) -> Letter:
        """Wait for a letter."""
        said, size = json.loads(self.connection.recv_bytes(LARGEST_HEADER))
        packed = torch.empty(size, dtype=torch.uint8) if size else NOTHING
        if size:
            self.connection.recv_bytes_into(packed.numpy().data)
        return Letter(said, packed)

    def hang_up(self) -> None:
        """Wake whoever reads or writes."""
        with suppress(OSError):
            self._plug.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connection back."""
        self._plug.close()
        self.connection.close()
