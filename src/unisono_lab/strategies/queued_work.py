"""The common part of strategies whose workers take the next part of the work as soon as they finish one."""

from __future__ import annotations

import platform
import secrets
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from unisono.errors import NoProgress, UnisonoError, Unreadable, WorkerLost
from unisono.received import short
from unisono.reduce.admission import Admission, address_of, call_again, calling, is_host, is_name, listen, present
from unisono.reduce.data_network import NetworkKeys
from unisono.reduce.peers import limit
from unisono.reduce.transport import Traffic
from unisono.train.model.tensors import Untouched
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser
from unisono_lab.strategies.parameter_server import StalenessBound
from unisono_lab.strategies.rpc_message import RpcConnection, RpcMessage

Gather = Callable[[Any], list[Any]]
"""Gathers the JSON values of all workers, by rank. Collective."""


Answer = Callable[[int, RpcMessage], RpcMessage]
"""Answers a message of the worker of this rank. Called on several threads, one for each other worker."""


class RpcEndpoint:
    """Asks other workers, and answers them on threads of its own.

    Connections belong to one generation, and a worker that calls shows the secret of the worker that it calls. When a
    connection is closed, all connections of this worker are, so that every thread that waits wakes.

    Args:
        rank: this worker's rank.
        host: the host name or address at which others reach this worker; empty if all workers are on one host.
        answer: a function that answers a request.
        traffic: a counter of sent bytes.
        timeout_s: the longest wait for another worker to read or to write, in seconds.
        name_of: a function that returns the name of a rank's worker, for messages.
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
        name_of: Callable[[int], str] = "rank {}".format,
        ends: Callable[[], None] = lambda: None,
        keys: NetworkKeys | None = None,
    ) -> None:
        self._ends, self._keys = ends, keys or NetworkKeys("")
        self._rank, self._answer, self._traffic, self._timeout_s = rank, answer, traffic, timeout_s
        self._name_of = name_of
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
        """Connect to all workers, before the first question. Collective. Close this endpoint if it fails.

        Raises:
            WorkerLost: another worker is gone.
            NoProgress: a worker did not answer in time.
        """
        for rank, contact in enumerate(gather([self.address, self._secret])):
            if rank != self._rank:
                with self._calling(rank):
                    call = partial(self._call, rank, *self._checked_contact(contact))
                    self._calls[rank] = call_again(call, self._timeout_s, lambda: self._is_closed)
        gather(None)  # all connections are open

    def ask(self, requests: Mapping[int, RpcMessage]) -> dict[int, RpcMessage]:
        """Ask some workers at once, and wait for all answers, by rank.

        Raises:
            WorkerLost: a worker is gone.
            NoProgress: a worker did not answer in time.
            UnisonoError: a worker could not answer; the message says why.
        """
        answers: dict[int, RpcMessage] = {}
        for rank, message in requests.items():
            with self._calling(rank):
                self._send(self._calls[rank], message)
        for rank in requests:
            with self._calling(rank):
                answers[rank] = self._calls[rank].receive()
        for rank, message in answers.items():
            if "in vain" in message.values:
                self.abort()
                raise NoProgress(message.values["in vain"])
            if "error" in message.values:
                raise UnisonoError(f"rank {rank} could not answer rank {self._rank}: {message.values['error']}")
        return answers

    def abort(self) -> None:
        """Shut all connections down, which wakes every thread that waits, here or on other workers. From any thread."""
        with self._lock:
            self._is_closed = True
            for line in self._lines:
                line.hang_up()
        self._ends()
        self._admission.end()

    def close(self) -> None:
        """Shut all connections down, and wait for the threads that answer."""
        self.abort()
        self._admission.close()  # first, since it starts such threads
        for thread in self._answering:
            thread.join()
        with self._lock:
            for line in self._lines:
                line.close()
            self._lines.clear()

    def _checked_contact(self, contact: Any) -> tuple[Any, str]:
        """The address and the secret of a worker, checked, since they came over the network."""
        match contact:
            case [str(name), str(secret)] if isinstance(self.address, str) and is_name(name) and secret.isascii():
                return name, secret
            case [[str(host), int(port)], str(secret)] if not isinstance(self.address, str) and secret.isascii():
                if is_host(host) and 0 < port < 2**16:
                    return (host, port), secret
        raise Unreadable(f"it announces {short(contact)}, which is no address of a worker")

    def _call(self, called: int, address: Any, secret: str) -> RpcConnection:
        connection = calling(address)
        line = self._opened(connection)
        try:
            limit(connection, self._timeout_s)
            connection.connect(address)
            if self._is_closed:  # abort came before there was a connection to shut down
                raise ConnectionAbortedError("this worker hangs up")
            present(connection, self._rank, secret)
            self._encrypt(line, self._rank, called, calls=True)
        except (OSError, EOFError):
            with self._lock:
                self._lines.remove(line)
            line.close()
            raise
        return line

    @contextmanager
    def _calling(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (BlockingIOError, TimeoutError) as error:
            self.abort()
            raise NoProgress(
                f"{self._name_of(self._rank)} waited for {self._name_of(rank)} in vain. It hangs, waits for another "
                f"worker, or takes longer than the others: see its log, or allow more with "
                f"unisono.init(faults={{'timeout_s': …}})"
            ) from error
        except Unreadable as error:
            self.abort()
            raise Unreadable(f"{self._name_of(rank)}: {error}") from error
        except (OSError, EOFError) as error:
            self.abort()
            raise WorkerLost(f"rank {self._rank} lost its connection to another worker: {error!r}") from error

    def _admit(self, rank: int, connection: socket.socket) -> bool:
        """Answer a worker that was admitted on a thread of its own. Called on the thread of the admission."""
        if rank in self._served:
            return False
        self._served.add(rank)
        line = self._opened(connection)
        thread = threading.Thread(target=self._serve, args=(rank, line), name="unisono-rpc", daemon=True)
        thread.start()
        self._answering.append(thread)
        return True

    def _serve(self, rank: int, line: RpcConnection) -> None:
        """Answer one worker as long as it asks. Runs on a thread of its own."""
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
                except Exception as error:  # noqa: BLE001 (the worker that asked raises it)
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


# Which worker computes what next, if none waits for the slowest one.


class WorkQueue:
    """Hands out the parts of one step after the other, each once. Many threads request them; some have to wait.

    ``timeout_s`` is the longest wait without progress of any other worker.

    Attributes:
        next: the number of the next item: the step times the number of parts, plus the part.
    """

    def __init__(
        self, parts: int, staleness: StalenessBound, timeout_s: float, name_of: Callable[[int], str] = "rank {}".format
    ) -> None:
        self.next, self._timeout_s = 0, timeout_s
        self._parts, self._staleness, self._name_of = parts, staleness, name_of
        self._changed = threading.Condition()
        self._is_over = False

    def claim(self, worker: int, step: int) -> int | None:
        """Take the next item of a step; None if it has none left. The worker has finished its item before.

        Raises:
            WorkerLost: the generation ends.
            NoProgress: the workers that must go first make no progress.
        """
        with self._changed:
            self._staleness.give_up(worker)  # a skipped step was not pushed
            self._changed.notify_all()
            self.next = max(self.next, step * self._parts)  # items left of an earlier step are those of lost workers
            self._wait(worker, lambda: self.next >= (step + 1) * self._parts or self._staleness.read(worker))
            if self.next >= (step + 1) * self._parts:
                return None
            self.next += 1
            self._changed.notify_all()
            return self.next - 1

    def taken(self, worker: int, step: int) -> None:
        """Wait until all items of a step are taken.

        Raises:
            WorkerLost: the generation ends.
            NoProgress: no worker takes them.
        """
        with self._changed:
            self._wait(worker, lambda: self.next >= (step + 1) * self._parts)

    def push(self, worker: int) -> None:
        """Wait until a worker may push its gradient.

        Raises:
            WorkerLost: the generation ends.
            NoProgress: the workers that must go first make no progress.
        """
        with self._changed:
            self._wait(worker, lambda: self._staleness.push(worker))
            self._changed.notify_all()

    def arrived(self, worker: int) -> None:
        """Count the push of a worker, which has arrived."""
        with self._changed:
            self._staleness.arrived(worker)
            self._changed.notify_all()

    def end(self) -> None:
        """Wake all threads that wait; they raise WorkerLost."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _wait(self, worker: int, holds: Callable[[], bool]) -> None:
        while not self._is_over:
            if holds():
                return
            if not self._changed.wait(self._timeout_s):
                ahead = ", ".join(self._name_of(rank) for rank in self._staleness.out if rank != worker) or "the others"
                raise NoProgress(
                    f"{self._name_of(worker)} waited for its turn in vain, which comes after {ahead}. It hangs, or "
                    f"takes longer than the others: see its log, or allow more with "
                    f"unisono.init(faults={{'timeout_s': …}})"
                )
        raise WorkerLost("a worker was lost while others waited for their turn")


# The common part of strategies whose workers take the next part of the work as soon as they finish one.

QUEUE_RANK = 0
"""The rank of the worker that holds the work queue."""


class QueuedWork(Synchroniser):
    """Workers send requests to each other, and ask rank 0 for the next part of the work."""

    def __init__(self, context: SyncContext, parts: int, bound: int | None) -> None:
        super().__init__(context)
        self.parts = parts
        self.rank = context.workers.rank
        self._is_bounded = bound is not None
        self._queue = WorkQueue(parts, StalenessBound(bound), context.timeout_s, self._name_of)
        self._item = 0  # one more than the number of this worker's newest item
        self._endpoint: RpcEndpoint | None = None
        self._hosts: list[str] = []
        self._context = context
        why = "With this strategy other workers have copies of them, and give them back as they were"
        self._untouched = Untouched(self.replica.weights, why)

    def open(self) -> None:
        """Connect to the other workers. Collective; constructors call it last."""
        workers = self.workers
        if workers.world_size > 1:
            self._hosts = workers.gather_json(platform.node())
            traffic, timeout_s = workers.transport.traffic, self._context.timeout_s
            self._endpoint = RpcEndpoint(
                self.rank, workers.host, self._answer, traffic, timeout_s, self._name_of, self._queue.end, workers.keys
            )
            workers.attach(self._endpoint.abort)
            try:
                self._endpoint.meet(workers.gather_json)
            except BaseException:
                self.close()
                raise

    def follow(self, before: Synchroniser) -> None:
        """Continue with the item after the newest one of the generation before."""
        super().follow(before)
        assert isinstance(before, QueuedWork)
        self._item = before._item * self.parts // before.parts

    def step_begins(self) -> None:
        """Refuse weights that the script has changed: other workers have copies, which would undo the change."""
        self._untouched.require()

    def claim(self, step: int) -> int | None:
        """Take the next part of a step from rank 0; None if there is none left."""
        ticket = self._request_from(QUEUE_RANK, RpcMessage({"ask": "claim", "step": step})).values["ticket"]
        if ticket is None:
            return None
        self._item = ticket + 1
        return int(ticket) % self.parts

    def _wait_for_step(self, step: int) -> None:
        """Wait until others have taken all items of a step, instead of waiting for the whole round where it ends."""
        self._request_from(QUEUE_RANK, RpcMessage({"ask": "taken", "step": step}))

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """Work out the common state; all workers continue after the newest item that any of them took."""
        if after_loss:
            self._item = self._queue.next = max(self.workers.gather_json(self._item))
        agreed = self._agreed()

        def make() -> None:
            agreed()
            self._untouched.accept()

        return make

    def close(self) -> None:
        """Close the connections to the others."""
        if self._endpoint is not None:
            self.workers.attach(None)
            self._endpoint.close()
            self._endpoint = None

    @abstractmethod
    def _agreed(self) -> Callable[[], None]:
        """Work out the central model; returns a function that sets it on this worker. Collective."""

    @abstractmethod
    def _answer_worker(self, rank: int, message: RpcMessage) -> RpcMessage:
        """Answer the worker of this rank. On any thread."""

    def _name_of(self, rank: int) -> str:
        return f"rank {rank} on host {self._hosts[rank]}"

    def _request_push(self) -> None:
        if self._is_bounded:
            self._request_from(QUEUE_RANK, RpcMessage({"ask": "push"}))

    def _report_arrival(self) -> None:
        if self._is_bounded:
            self._request_from(QUEUE_RANK, RpcMessage({"ask": "arrived"}))

    def _request_from(self, rank: int, message: RpcMessage) -> RpcMessage:
        return self._request({rank: message})[rank]

    def _request(self, requests: Mapping[int, RpcMessage]) -> dict[int, RpcMessage]:
        others = {rank: message for rank, message in requests.items() if rank != self.rank}
        self.workers.is_asking = True
        try:
            answers = self._endpoint.ask(others) if others and self._endpoint is not None else {}
            if self.rank in requests:
                answers[self.rank] = self._answer(self.rank, requests[self.rank])
        finally:
            self.workers.is_asking = False
        return answers

    def _answer(self, rank: int, message: RpcMessage) -> RpcMessage:
        request: Mapping[str, Any] = message.values
        match request["ask"]:
            case "claim":
                return RpcMessage({"ticket": self._queue.claim(rank, request["step"])})
            case "taken":
                self._queue.taken(rank, request["step"])
                return RpcMessage()
            case "push":
                self._queue.push(rank)
                return RpcMessage()
            case "arrived":
                self._queue.arrived(rank)
                return RpcMessage()
        return self._answer_worker(rank, message)
