"""Messages between two workers at a time: one asks, and the other answers on a thread of its own."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from unisono.errors import NoProgress, UnisonoError, Unreadable, WorkerLost
from unisono.received import short
from unisono.reduce.admission import Admission, call_again, present
from unisono.reduce.data_network import NetworkKeys
from unisono.reduce.peers import limit
from unisono.reduce.rpc_message import RpcConnection, RpcMessage, address_of, calling, is_host, is_name, listen
from unisono.reduce.transport import Traffic

Gather = Callable[[Any], list[Any]]
"""Every worker's JSON value, by rank. Collective."""


Answer = Callable[[int, RpcMessage], RpcMessage]
"""What a worker answers the one of that rank. Called on several threads, one for each of the others."""


class RpcEndpoint:
    """Asks other workers, and answers them on threads of its own.

    Connections belong to this generation alone, and whoever calls shows the secret of the one who is called. When one
    is closed, all of this worker's are, so that whoever waits for anybody wakes.

    Args:
        rank: this worker's rank.
        host: the host name or address under which others reach this worker; empty if all of them are on one host.
        answer: a function that answers a request.
        traffic: a counter of what is sent.
        timeout_s: the longest wait for another worker, to listen or to speak, in seconds.
        called: a function that returns the name of a rank's worker, for messages.
        ends: a function that is called when the connections are closed, from either side; from any thread.
        keys: the keys of the network between these workers; by default they speak plaintext.

    Attributes:
        address: the address at which others call this worker: a name, or host and port.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        answer: Answer,
        traffic: Traffic,
        timeout_s: float,
        called: Callable[[int], str] = "rank {}".format,
        ends: Callable[[], None] = lambda: None,
        keys: NetworkKeys | None = None,
    ) -> None:
        self._ends, self._keys = ends, keys or NetworkKeys("")
        self._rank, self._answer, self._traffic, self._timeout_s = rank, answer, traffic, timeout_s
        self._called = called
        self._calls: dict[int, RpcConnection] = {}
        self._lines: list[RpcConnection] = []
        self._lock, self._is_closed = threading.Lock(), False
        self._secret = secrets.token_hex(32)
        self._served: set[int] = {rank}
        self._answering: list[threading.Thread] = []
        listening = listen(host)
        self.address = address_of(listening)
        self._admission = Admission(listening, self._secret, self._admit)

    def meet(self, gather: Gather) -> None:
        """Call everybody, before anybody is asked. Collective. If it fails, close.

        Args:
            gather: tells every worker what each of them says.

        Raises:
            WorkerLost: another worker is gone.
            NoProgress: one did not answer the call in time.
        """
        for rank, told in enumerate(gather([self.address, self._secret])):
            if rank != self._rank:
                with self._talking_to(rank):
                    call = partial(self._call, rank, *self._known(told))
                    self._calls[rank] = call_again(call, self._timeout_s, lambda: self._is_closed)
        gather(None)  # all have called everybody

    def ask(self, questions: Mapping[int, RpcMessage]) -> dict[int, RpcMessage]:
        """Ask some workers at once, and wait for all answers.

        Returns:
            the answers, by rank.

        Raises:
            WorkerLost: a worker is gone.
            NoProgress: one gave no answer in time.
            UnisonoError: one could not answer; says why.
        """
        answers: dict[int, RpcMessage] = {}
        for rank, message in questions.items():
            with self._talking_to(rank):
                self._send(self._calls[rank], message)
        for rank in questions:
            with self._talking_to(rank):
                answers[rank] = self._calls[rank].receive()
        for rank, message in answers.items():
            if "in vain" in message.said:
                self.abort()
                raise NoProgress(message.said["in vain"])
            if "error" in message.said:
                raise UnisonoError(f"rank {rank} could not answer rank {self._rank}: {message.said['error']}")
        return answers

    def abort(self) -> None:
        """Hang up on everybody: whoever waits, here or there, wakes. From any thread."""
        with self._lock:
            self._is_closed = True
            for line in self._lines:
                line.hang_up()
        self._ends()
        self._admission.end()

    def close(self) -> None:
        """Hang up, and wait until nobody is answered any more."""
        self.abort()
        self._admission.close()  # first: it adds others
        for thread in self._answering:
            thread.join()
        with self._lock:
            for line in self._lines:
                line.close()
            self._lines.clear()

    def _known(self, told: Any) -> tuple[Any, str]:
        """Where a worker can be called, and its secret: nobody has checked what came from it."""
        match told:
            case [str(name), str(secret)] if isinstance(self.address, str) and is_name(name) and secret.isascii():
                return name, secret
            case [[str(host), int(port)], str(secret)] if not isinstance(self.address, str) and secret.isascii():
                if is_host(host) and 0 < port < 2**16:
                    return (host, port), secret
        raise Unreadable(f"it says that it can be called at {short(told)}, which is no address of a worker")

    def _call(self, called: int, address: Any, secret: str) -> RpcConnection:
        connection = calling(address)
        line = self._opened(connection)
        try:
            limit(connection, self._timeout_s)
            connection.connect(address)
            if self._is_closed:  # before there was a connection to hang up on
                raise ConnectionAbortedError("this worker hangs up")
            present(connection, self._rank, secret)
            self._encrypt(line, self._rank, called, calls=True)
        except (OSError, EOFError):
            self._let_go(line)
            raise
        return line

    @contextmanager
    def _talking_to(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (BlockingIOError, TimeoutError) as error:
            self.abort()
            raise NoProgress(
                f"{self._called(self._rank)} waited for {self._called(rank)} in vain. It hangs, waits for somebody "
                f"else, or takes longer for something than the others: see its log, or allow more with "
                f"unisono.init(faults={{'timeout_s': …}})"
            ) from error
        except Unreadable as error:
            self.abort()
            raise Unreadable(f"{self._called(rank)}: {error}") from error
        except (OSError, EOFError) as error:
            self.abort()
            raise WorkerLost(f"rank {self._rank} lost its connection to another worker: {error!r}") from error

    def _admit(self, rank: int, connection: socket.socket) -> bool:
        """On the thread of the admission: a worker that belongs here is answered on a thread of its own."""
        if rank in self._served:
            return False
        self._served.add(rank)
        self._answering.append(self._thread(self._serve, rank, self._opened(connection)))
        return True

    def _serve(self, rank: int, line: RpcConnection) -> None:
        """On a thread: answer one worker as long as it asks."""
        with suppress(OSError, EOFError, Unreadable):
            self._encrypt(line, rank, self._rank, calls=False)
            while True:
                message = line.receive()
                try:
                    answer = self._answer(rank, message)
                except NoProgress as error:
                    answer = RpcMessage({"in vain": str(error)})
                except WorkerLost:
                    break
                except Exception as error:  # noqa: BLE001 (the one who asked raises it)
                    answer = RpcMessage({"error": f"{type(error).__name__}: {error}"})
                self._send(line, answer)
        self.abort()

    def _encrypt(self, line: RpcConnection, caller: int, called: int, *, calls: bool) -> None:
        context = self._keys.context(calls=calls)
        if context is not None:
            line.encrypt(context, caller, called, self._timeout_s)
            if self._is_closed:  # while there was no connection to hang up on
                raise ConnectionAbortedError("this worker hangs up")

    def _send(self, line: RpcConnection, message: RpcMessage) -> None:
        self._traffic.count(line.send(message), 1)

    def _opened(self, connection: socket.socket) -> RpcConnection:
        line = RpcConnection(connection)
        with self._lock:
            self._lines.append(line)
            if self._is_closed:
                line.hang_up()
        return line

    def _let_go(self, line: RpcConnection) -> None:
        with self._lock:
            self._lines.remove(line)
        line.close()

    def _thread(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="unisono-rpc", daemon=True)
        thread.start()
        return thread
