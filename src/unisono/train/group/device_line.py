"""The connections of a worker's devices: the first one speaks with the coordinator, the others with the first one."""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from time import monotonic
from typing import Any, BinaryIO

from pydantic import ValidationError

from unisono.errors import LaunchError, WorkerLost
from unisono.membership.client import ANSWER_S, WorkerConnection
from unisono.membership.messages import LONGEST_MESSAGE, JobOver, StoreReply, StoreRequest
from unisono.received import is_same_user
from unisono.reduce.admission import address_of, is_name, listen
from unisono.reduce.peers import RendezvousStore
from unisono.train.group.device_messages import Farewell, FromDevice, MessageMerger, ToDevice, from_device, to_device

DOOR = "device line"
COORDINATOR = "coordinator"
"""Names under which the first device posts where it listens, and from where it reaches the coordinator."""

GONE = "another device of this worker is gone: see its log"

Receive = Callable[[ToDevice], None]
OpenLine = Callable[[Receive], WorkerConnection]


class FirstLine:
    """The connection of a worker's first device, which speaks for all of them.

    All devices receive the coordinator's messages, and the messages to all of them, in the same order.

    Args:
        board: a store that the devices share.
        open_line: a function that opens the connection to the coordinator, whose messages go to its argument.
        receive: a function that gets this device's messages, one at a time.

    Raises:
        WorkerLost: another device does not come.
        LaunchError: the coordinator cannot be reached.
    """

    def __init__(
        self, devices: int, board: RendezvousStore, open_line: OpenLine, receive: Receive, timeout_s: float
    ) -> None:
        self._merger, self._receive = MessageMerger(devices), receive
        self._lock = threading.RLock()  # held for each message, so that all devices hear messages in one order
        self._is_over = False
        self._others = _called(devices, board, timeout_s)
        try:
            self._line = open_line(self.deliver)
        except BaseException:
            for connection in self._others.values():
                connection.close()
            raise
        self.url, self.kept, self.request = self._line.url, self._line.kept, self._line.request
        board.post(COORDINATOR, self._line.local_address.encode())
        for device, connection in self._others.items():
            self._thread(self._listen, device, connection)

    @property
    def generation(self) -> int:
        """The generation that this worker is in."""
        return self._line.generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._line.generation = generation

    @property
    def silent_s(self) -> float:
        """The seconds since the last word of the coordinator."""
        return self._line.silent_s

    @property
    def local_address(self) -> str:
        """The address of this host on the connection to the coordinator."""
        return self._line.local_address

    def send(self, message: FromDevice) -> None:
        """Send a message of this device."""
        self._merge(0, message)

    def deliver(self, message: ToDevice) -> None:
        """Send a message to all devices, after those that they have received before."""
        with self._lock:
            self._is_over |= isinstance(message, Farewell)
            for device in self._others:
                self._write(device, message)
            self._receive(message)

    def cut(self, seconds: float) -> None:
        """Cut the connection to the coordinator for so many seconds, as a network fault does."""
        self._line.cut(seconds)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._is_over = True
        self._line.close()
        for connection in self._others.values():
            hang_up(connection)

    def _merge(self, device: int, message: FromDevice) -> None:
        with self._lock:
            outgoing = self._merger.merge(device, message)
            for outside in outgoing.outside:
                self._line.send(outside)
            for other, inside in outgoing.inside:
                if other:
                    self._write(other, inside)
                else:
                    self._receive(inside)

    def _write(self, device: int, message: ToDevice) -> None:
        with suppress(OSError):  # the thread that reads from it notes that it is gone
            self._others[device].sendall(_packed(message))

    def _listen(self, device: int, connection: socket.socket) -> None:
        for message in _read(connection, from_device):
            if isinstance(message, StoreRequest):  # its answer may take long
                self._thread(self._answer, device, message)
            else:
                self._merge(device, message)
        with self._lock:
            if not self._is_over:
                self.deliver(JobOver(reason=GONE))

    def _answer(self, device: int, request: StoreRequest) -> None:
        try:
            reply = self._line.request(request).model_copy(update={"id": request.id})
        except LaunchError as error:
            reply = StoreReply(id=request.id, error=str(error)[:LONGEST_ERROR])
        with self._lock:
            self._write(device, reply)

    def _thread(self, run: Callable[..., None], *about: Any) -> None:
        threading.Thread(target=run, args=about, name="unisono-device", daemon=True).start()


LONGEST_ERROR = 4096
"""Characters of an error that another device is told."""


class DeviceLine:
    """The connection of any other device of a worker to the first one.

    Args:
        device: the place of this device among those of the worker.
        receive: a function that gets this device's messages, one at a time.

    Attributes:
        local_address: the address of this host on the first device's connection to the coordinator.
        kept: objects that have to live as long as the line.
        silent_s: always 0: the first device hears of the coordinator, or is gone itself.

    Raises:
        WorkerLost: the first device is gone.
        LaunchError: the first device does not come.
    """

    silent_s = 0.0

    def __init__(self, device: int, board: RendezvousStore, url: str, receive: Receive, timeout_s: float) -> None:
        self.url, self.kept, self.generation = url, list[object](), 0
        self._receive, self._timeout_s = receive, timeout_s
        self._lock = threading.Lock()
        self._numbers, self._pending = itertools.count(1), dict[int, Future[StoreReply]]()
        self._is_over = self._is_closed = False
        self._connection = _call(device, board.read(DOOR).decode("ascii", "replace"), timeout_s)
        try:
            self.local_address = board.read(COORDINATOR).decode()
        except BaseException:
            self._connection.close()
            raise
        threading.Thread(target=self._listen, name="unisono-device", daemon=True).start()

    def send(self, message: FromDevice) -> None:
        """Send a message to the first device."""
        with self._lock, suppress(OSError):  # the thread that reads from it notes that it is gone
            self._connection.sendall(_packed(message))

    def request(self, request: StoreRequest, answer_s: float = ANSWER_S) -> StoreReply:
        """Ask the key-value store through the first device, and wait for the answer.

        Raises:
            LaunchError: no answer came in time, or the line has ended.
        """
        answer: Future[StoreReply] = Future()
        with self._lock:
            if self._is_closed:
                raise LaunchError(GONE)
            number = next(self._numbers)
            self._pending[number] = answer
        self.send(request.model_copy(update={"id": number}))
        try:
            return answer.result(request.timeout_s + answer_s)
        except TimeoutError as error:
            raise LaunchError(f"the coordinator at {self.url} did not answer") from error
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def deliver(self, message: ToDevice) -> None:
        """Do nothing: the first device sends messages to all devices."""

    def cut(self, seconds: float) -> None:
        """Do nothing: the first device has the connection to the coordinator."""

    def close(self) -> None:
        """Close the connection."""
        self._end()
        hang_up(self._connection)

    def _listen(self) -> None:
        for message in _read(self._connection, to_device):
            self._is_over |= isinstance(message, Farewell)
            if isinstance(message, StoreReply):
                with self._lock:
                    answer = self._pending.pop(message.id, None)
                if answer is not None:
                    answer.set_result(message)
            else:
                self._receive(message)
        if not self._is_over:
            self._receive(JobOver(reason=GONE))
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._is_over = self._is_closed = True
            unanswered = list(self._pending.values())
            self._pending.clear()
        for answer in unanswered:
            answer.set_exception(LaunchError(GONE))


def _called(devices: int, board: RendezvousStore, timeout_s: float) -> dict[int, socket.socket]:
    """Accept the connections of all other devices, and return them by the devices' places."""
    deadline, connections = monotonic() + timeout_s, dict[int, socket.socket]()
    with ExitStack() as opened:
        with listen("") as listener:
            board.post(DOOR, str(address_of(listener)).encode())
            while len(connections) < devices - 1:
                connection = opened.enter_context(_next_caller(listener, deadline))
                device = _place(connection)
                if device in range(1, devices) and device not in connections:
                    connections[device] = connection
                    connection.settimeout(None)
                else:
                    connection.close()
        opened.pop_all()
    return connections


def _next_caller(listening: socket.socket, until: float) -> socket.socket:
    listening.settimeout(max(0.001, until - monotonic()))
    try:
        connection, _ = listening.accept()
    except TimeoutError as error:
        raise WorkerLost("the first device of this worker waited in vain for the others: see their logs") from error
    return connection


HELLO_S = 5.0
"""Seconds that a caller may take to say its place."""


def _place(connection: socket.socket) -> int:
    """Read the place that a caller says it has; -1 for a caller that does not belong here."""
    try:
        connection.settimeout(HELLO_S)
        data = connection.recv(1) if is_same_user(connection) else b""
    except OSError:
        return -1
    return data[0] if data else -1


def _call(device: int, door: str, timeout_s: float) -> socket.socket:
    if not is_name(door):
        raise WorkerLost("the posted address of this worker's first device is not valid")
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(door)
        if not is_same_user(connection):
            raise PermissionError("a process of another user answers in its place")
        connection.sendall(bytes([device]))
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise WorkerLost(f"the first device of this worker is gone: {error}. See its log") from error
    return connection


def hang_up(connection: socket.socket) -> None:
    """End a connection for both sides. Any thread may call it; the thread that reads from the connection closes it."""
    with suppress(OSError):  # closed or broken already
        connection.shutdown(socket.SHUT_RDWR)


def _packed(message: Any) -> bytes:
    return message.model_dump_json().encode() + b"\n"  # type: ignore[no-any-return]


def _read(connection: socket.socket, kinds: Any) -> Iterator[Any]:
    """Yield the messages that arrive, until the connection ends or something arrives that is no message."""
    with connection, connection.makefile("rb") as lines, suppress(OSError, ValidationError):
        while line := _line(lines):
            yield kinds.validate_json(line)


def _line(lines: BinaryIO) -> bytes:
    line = lines.readline(2 * LONGEST_MESSAGE)
    return line if line.endswith(b"\n") else b""
