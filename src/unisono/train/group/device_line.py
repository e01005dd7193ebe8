"""The connections of a worker's devices: the first one speaks with the coordinator, the others with it."""

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
from unisono.membership.client import ANSWER_S, Line
from unisono.membership.messages import JobOver, StoreReply, StoreRequest
from unisono.membership.parser import LONGEST_MESSAGE
from unisono.received import is_same_user
from unisono.reduce.peers import RendezvousStore
from unisono.reduce.rpc_message import address_of, is_name, listen
from unisono.train.group.news import Farewell
from unisono.train.group.one_voice import FromDevice, OneVoice, ToDevice, from_device, to_device

DOOR = "device line"
COORDINATOR = "coordinator"
"""Names under which the first device posts where it listens, and from where it reaches the coordinator."""

GONE = "another device of this worker is gone: see its log"

Hear = Callable[[ToDevice], None]
OpenLine = Callable[[Hear], Line]


class FirstLine:
    """The line of a worker's first device, which speaks for all of them.

    What the coordinator says, and what is said to all, all devices hear in one order.

    Args:
        devices: the number of devices of the worker.
        board: a store that they share.
        open_line: a function that opens the connection to the coordinator, whose messages go to its argument.
        hear: a function that gets what this device hears, one message at a time.
        timeout_s: the longest wait for the other devices, in seconds.

    Raises:
        WorkerLost: another device does not come.
        LaunchError: the coordinator cannot be reached.
    """

    def __init__(self, devices: int, board: RendezvousStore, open_line: OpenLine, hear: Hear, timeout_s: float) -> None:
        self._voice, self._hear = OneVoice(devices), hear
        self._lock = threading.RLock()  # around all that is said and heard, so that all hear it in one order
        self._is_over = False
        self._others = _called(devices, board, timeout_s)
        try:
            self._line = open_line(self.tell)
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
        """Seconds since the coordinator was heard of last."""
        return self._line.silent_s

    @property
    def local_address(self) -> str:
        """The address of this host on the connection to the coordinator."""
        return self._line.local_address

    def send(self, message: FromDevice) -> None:
        """This device says something."""
        self._say(0, message)

    def tell(self, message: ToDevice) -> None:
        """Have all devices hear something, after what they have heard before."""
        with self._lock:
            self._is_over |= isinstance(message, Farewell)
            for device in self._others:
                self._write(device, message)
            self._hear(message)

    def cut(self, seconds: float) -> None:
        """Lose the connection to the coordinator for so many seconds, as a network fault does."""
        self._line.cut(seconds)

    def close(self) -> None:
        """Hang up on everybody."""
        with self._lock:
            self._is_over = True
        self._line.close()
        for connection in self._others.values():
            hang_up(connection)

    def _say(self, device: int, message: FromDevice) -> None:
        with self._lock:
            said = self._voice.said(device, message)
            for outside in said.outside:
                self._line.send(outside)
            for other, inside in said.inside:
                if other:
                    self._write(other, inside)
                else:
                    self._hear(inside)

    def _write(self, device: int, message: ToDevice) -> None:
        with suppress(OSError):  # whoever reads from it hears that it is gone
            self._others[device].sendall(_packed(message))

    def _listen(self, device: int, connection: socket.socket) -> None:
        for message in _read(connection, from_device):
            if isinstance(message, StoreRequest):  # whose answer may take long
                self._thread(self._answer, device, message)
            else:
                self._say(device, message)
        with self._lock:
            if not self._is_over:
                self.tell(JobOver(reason=GONE))

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


class DeviceLine:
    """The line of any other device of a worker, to the first one.

    Args:
        device: the place of this device among those of the worker.
        board: a store that they share.
        url: the coordinator's URL.
        hear: a function that gets what is heard, one message at a time.
        timeout_s: the longest wait for the first device, in seconds.

    Attributes:
        url: the argument.
        local_address: the address of this host on the first device's connection to the coordinator.
        kept: objects that have to live as long as the line.
        generation: the generation that this worker is in.
        silent_s: 0: the first device hears of the coordinator, or is gone.

    Raises:
        WorkerLost: the first device is gone.
        LaunchError: it does not come.
    """

    silent_s = 0.0

    def __init__(self, device: int, board: RendezvousStore, url: str, hear: Hear, timeout_s: float) -> None:
        self.url, self.kept, self.generation = url, list[object](), 0
        self._hear, self._timeout_s = hear, timeout_s
        self._lock = threading.Lock()
        self._numbers, self._asked = itertools.count(1), dict[int, Future[StoreReply]]()
        self._is_over = self._is_closed = False
        self._connection = _call(device, board.read(DOOR).decode("ascii", "replace"), timeout_s)
        try:
            self.local_address = board.read(COORDINATOR).decode()
        except BaseException:
            self._connection.close()
            raise
        threading.Thread(target=self._listen, name="unisono-device", daemon=True).start()

    def send(self, message: FromDevice) -> None:
        """Say something to the first device."""
        with self._lock, suppress(OSError):  # whoever reads from it hears that it is gone
            self._connection.sendall(_packed(message))

    def request(self, request: StoreRequest, answer_s: float = ANSWER_S) -> StoreReply:
        """Ask the key-value store by the first device, and wait.

        Raises:
            LaunchError: no answer came in time, or the line has ended.
        """
        answer: Future[StoreReply] = Future()
        with self._lock:
            if self._is_closed:
                raise LaunchError(GONE)
            number = next(self._numbers)
            self._asked[number] = answer
        self.send(request.model_copy(update={"id": number}))
        try:
            return answer.result(request.timeout_s + answer_s)
        except TimeoutError as error:
            raise LaunchError(f"the coordinator at {self.url} did not answer") from error
        finally:
            with self._lock:
                self._asked.pop(number, None)

    def tell(self, message: ToDevice) -> None:
        """What is said to all the first device says."""

    def cut(self, seconds: float) -> None:
        """The first device has the connection to the coordinator."""

    def close(self) -> None:
        """Hang up."""
        self._end()
        hang_up(self._connection)

    def _listen(self) -> None:
        for message in _read(self._connection, to_device):
            self._is_over |= isinstance(message, Farewell)
            if isinstance(message, StoreReply):
                with self._lock:
                    answer = self._asked.pop(message.id, None)
                if answer is not None:
                    answer.set_result(message)
            else:
                self._hear(message)
        if not self._is_over:
            self._hear(JobOver(reason=GONE))
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._is_over = self._is_closed = True
            unanswered = list(self._asked.values())
            self._asked.clear()
        for answer in unanswered:
            answer.set_exception(LaunchError(GONE))


def _called(devices: int, board: RendezvousStore, timeout_s: float) -> dict[int, socket.socket]:
    """The connections of all other devices, by their places."""
    until, found = monotonic() + timeout_s, dict[int, socket.socket]()
    with ExitStack() as opened:
        with listen("") as listening:
            board.post(DOOR, str(address_of(listening)).encode())
            while len(found) < devices - 1:
                connection = opened.enter_context(_next_caller(listening, until))
                device = _place(connection)
                if device in range(1, devices) and device not in found:
                    found[device] = connection
                    connection.settimeout(None)
                else:
                    connection.close()
        opened.pop_all()
    return found


def _next_caller(listening: socket.socket, until: float) -> socket.socket:
    listening.settimeout(max(0.001, until - monotonic()))
    try:
        connection, _ = listening.accept()
    except TimeoutError as error:
        raise WorkerLost("the first device of this worker waited in vain for the others: see their logs") from error
    return connection


HELLO_S = 5.0


def _place(connection: socket.socket) -> int:
    """The place that a caller says it has; -1 for one that does not belong here."""
    try:
        connection.settimeout(HELLO_S)
        said = connection.recv(1) if is_same_user(connection) else b""
    except OSError:
        return -1
    return said[0] if said else -1


def _call(device: int, door: str, timeout_s: float) -> socket.socket:
    if not is_name(door):
        raise WorkerLost("the first device of this worker is told to be where no device is")
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
    """Have both sides hear no more on a connection. From any thread; whoever reads from it closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _packed(message: Any) -> bytes:
    return message.model_dump_json().encode() + b"\n"  # type: ignore[no-any-return]


def _read(connection: socket.socket, kinds: Any) -> Iterator[Any]:
    """The messages that come, until the connection ends, or something comes that is none."""
    with connection, connection.makefile("rb") as lines, suppress(OSError, ValidationError):
        while line := _line(lines):
            yield kinds.validate_json(line)


def _line(lines: BinaryIO) -> bytes:
    found = lines.readline(2 * LONGEST_MESSAGE)
    return found if found.endswith(b"\n") else b""
