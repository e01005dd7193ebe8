"""Where workers can be called, and who is let in: both sides prove that they know a secret, within limits."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from unisono.received import is_same_user

MOST_CALLERS = 1024
"""The most callers that the kernel lets wait."""

MOST_STRANGERS = 64
"""Callers that have not shown yet that they know the secret. One more, and one is dropped."""

PATIENCE_S = 5.0
"""Seconds that a caller may take for its part: three short messages."""

RETRY_S = 0.02
"""After which a caller that was dropped calls again."""

_NONCE = 32
_PROOF = 32
_CALL = struct.Struct(f"<8si{_NONCE}s")
_ENDS = struct.Struct("<8sii")
_MARK = b"unisono2"
_WELCOME = b"w"
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

T = TypeVar("T")

Admit = Callable[[int, socket.socket], bool]
"""Takes over the connection to the worker of this rank; False if it may not have one."""


class Impostor(OSError):
    """The other side does not know the secret, or belongs to another user."""


class Admission:
    """Lets callers in that know the secret, and hangs up on all others.

    Until then nothing of a caller is kept but a descriptor and a hundred bytes, and no thread waits for it. What it
    sends has a fixed length: there is none that it could make up.

    Args:
        listening: the listening socket; closed in the end.
        admit: a function that gets each admitted connection, on the thread.
        most: the largest number of callers at a time whose secret is not checked yet.
        patience_s: the seconds that each caller may take.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: str,
        admit: Admit,
        *,
        most: int = MOST_STRANGERS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._listening, self._secret, self._admit = listening, secret, admit
        self._most, self._patience_s = most, patience_s
        self._is_over = False
        self._is_unix = listening.family == socket.AF_UNIX
        self._callers: dict[int, _Caller] = {}  # by descriptor, who has waited the longest first
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="unisono-admission", daemon=True)
        self._thread.start()

    @property
    def strangers(self) -> int:
        """The number of callers under way."""
        return len(self._callers)

    def end(self) -> None:
        """Let nobody in any more. From any thread."""
        self._is_over = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End, and give everything back."""
        self.end()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._is_over:
                self._turn()
        finally:
            for caller in list(self._callers.values()):
                self._drop(caller)
            self._selector.close()
            self._listening.close()

    def _turn(self) -> None:
        """Wait for what happens next."""
        for key, _ in self._selector.select(self._wait_s()):
            if key.fileobj is self._listening:
                self._accept()
            elif key.fd in self._callers:  # not dropped in this turn
                self._receive(self._callers[key.fd])
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.until <= now]:
            self._drop(caller)

    def _wait_s(self) -> float | None:
        oldest = next(iter(self._callers.values()), None)
        return None if oldest is None else max(0.0, oldest.until - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, address = self._listening.accept()
        except OSError as error:  # it has hung up meanwhile, or this worker has
            if error.errno in _NO_DESCRIPTORS:
                self._make_room()
            return
        connection.setblocking(False)
        if self._is_unix and not is_same_user(connection):
            connection.close()
            return
        until = time.monotonic() + self._patience_s
        caller = _Caller(connection, _network_of(connection.family, address), greet(connection, self._secret), until)
        self._callers[connection.fileno()] = caller
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._callers) > self._most:
            self._make_room()

    def _make_room(self) -> None:
        # The caller that has waited longest in the network with most callers: a flood displaces its own callers.
        # Workers are through in an instant, and call again.
        callers = Counter(caller.network for caller in self._callers.values())
        if callers:
            most, _ = callers.most_common(1)[0]
            self._drop(next(caller for caller in self._callers.values() if caller.network == most))
        else:
            time.sleep(RETRY_S)

    def _receive(self, caller: _Caller) -> None:
        try:
            rank = caller.receive()
        except (OSError, EOFError):
            self._drop(caller)
            return
        if rank is not None:
            self._forget(caller)
            caller.connection.setblocking(True)
            if not self._admit(rank, caller.connection):
                caller.connection.close()

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._callers[caller.connection.fileno()]


@dataclass(slots=True)
class _Caller:
    """A caller that has not yet shown that it may come in.

    Attributes:
        connection: the connection to the caller.
        network: the part of its address that many callers share.
        talk: the conversation, as :func:`greet` makes it.
        until: the end of its time, on the monotonic clock.
    """

    connection: socket.socket
    network: bytes
    talk: Generator[int, bytes, int]
    until: float
    awaited: int = 0
    received: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.awaited = next(self.talk)

    def receive(self) -> int | None:
        """Receive bytes; return the caller's rank once it has shown that it may talk.

        Raises:
            EOFError, OSError: it may not.
        """
        data = self.connection.recv(self.awaited - len(self.received))
        if not data:
            raise EOFError
        self.received += data
        if len(self.received) == self.awaited:
            message, self.received = bytes(self.received), bytearray()
            try:
                self.awaited = self.talk.send(message)
            except StopIteration as end:
                return int(end.value)
        return None


def _network_of(family: int, address: Any) -> bytes:
    """The part of an address that nobody can have many of; nothing for a Unix socket."""
    if family == socket.AF_UNIX:
        return b""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    return packed[:8]  # of IPv6, what a host is given as a whole


def greet(connection: socket.socket, secret: str) -> Generator[int, bytes, int]:
    """Greet a caller: yields the number of bytes to receive next, and returns the caller's rank.

    Raises:
        Impostor: it does not know the secret.
        OSError: it has hung up, or takes nothing.
    """
    mark, rank, theirs = _CALL.unpack((yield _CALL.size))
    if mark != _MARK or rank < 0:
        raise Impostor("no call of a worker")
    ours = secrets.token_bytes(_NONCE)
    connection.send(ours + _proof(secret, b"answers", rank, theirs, ours))  # a new connection has room for it
    if not hmac.compare_digest((yield _PROOF), _proof(secret, b"calls", rank, theirs, ours)):
        raise Impostor("no worker of this generation")
    connection.send(_WELCOME)
    return int(rank)


def present(connection: socket.socket, rank: int, secret: str) -> None:
    """Show the one who is called that this worker knows its secret, and have it show the same.

    On a Unix socket, the process at its other end has to belong to this user. ``secret`` is the called worker's.

    Raises:
        Impostor: somebody else answers.
        EOFError, OSError: nobody does, or it has hung up.
    """
    if connection.family == socket.AF_UNIX and not is_same_user(connection):
        raise Impostor("a process of another user answers there")
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(_CALL.pack(_MARK, rank, ours))
    answer = receive(connection, _NONCE + _PROOF)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"answers", rank, ours, theirs)):
        raise Impostor("who answers there is no worker of this generation")
    connection.sendall(_proof(secret, b"calls", rank, ours, theirs))
    if receive(connection, len(_WELCOME)) != _WELCOME:
        raise Impostor("who answers there speaks another language")


def call_again(call: Callable[[], T], timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> T:
    """Call a worker. It may drop this one together with strangers: then it is called again.

    ``call`` connects, and leaves nothing open where it raises an error of a connection. ``timeout_s`` are the seconds
    within which one may have to call again; ``is_over`` says whether nobody is to be called any more.

    Raises:
        ConnectionRefusedError: nobody listens there.
        OSError, EOFError: it fails for another reason, or to the end.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except ConnectionRefusedError:
            raise
        except (ConnectionError, EOFError):
            if is_over() or time.monotonic() > until:
                raise
            time.sleep(RETRY_S)


def identify(connection: socket.socket, caller: int, called: int) -> None:
    """Say over an encrypted connection who is at its ends: an outsider may have put two connections together.

    Both sides do it.

    Raises:
        Impostor: it is somebody else.
        EOFError, OSError: the other side does not belong here, has hung up, or says nothing.
    """
    ends = _ENDS.pack(_MARK, caller, called)
    connection.sendall(ends)
    if receive(connection, _ENDS.size) != ends:
        raise Impostor("another worker is at its other end")


def receive(connection: socket.socket, size: int) -> bytes:
    """Receive so many bytes.

    Raises:
        EOFError: the other side has hung up.
        OSError: they do not come.
    """
    data = bytearray(size)
    fill(connection, memoryview(data))
    return bytes(data)


def fill(connection: socket.socket, room: memoryview) -> None:
    """As many bytes as there is room for, in place; raises as :func:`receive` does."""
    while room:
        count = connection.recv_into(room)
        if not count:
            raise EOFError("its end of the connection is closed")
        room = room[count:]


def _proof(secret: str, role: bytes, rank: int, caller: bytes, called: bytes) -> bytes:
    return hmac.digest(secret.encode(), _CALL.pack(role, rank, caller) + called, "sha256")


# Where workers can be called: addresses that are made here, and those that came from others.

_NAME = re.compile(r"\0unisono-[0-9a-f]{32}")


def listen(host: str) -> socket.socket:
    """A socket that listens.

    ``host`` is the address at which workers of other hosts call; empty for a Unix socket, which has no name among
    files.
    """
    listening = socket.socket(family_of(host) if host else socket.AF_UNIX)
    try:
        listening.bind((host, 0) if host else f"\0unisono-{secrets.token_hex(16)}")
        listening.listen(MOST_CALLERS)
    except OSError:
        listening.close()
        raise
    return listening


Address = str | tuple[str, int]
"""Where a worker can be called: the name of a Unix socket, or host and port."""


def calling(address: Address) -> socket.socket:
    """A socket from which to call there."""
    return socket.socket(socket.AF_UNIX if isinstance(address, str) else family_of(address[0]))


def address_of(listening: socket.socket) -> Address:
    """Where to call, as JSON values."""
    address = listening.getsockname()
    return address.decode("ascii") if isinstance(address, bytes) else (address[0], address[1])


def is_name(name: str) -> bool:
    """Whether workers listen at Unix sockets of such names."""
    return _NAME.fullmatch(name) is not None


def is_host(host: str) -> bool:
    """Whether this is an address of a host, and not a name that somebody would have to be asked for."""
    try:
        return "%" not in str(ipaddress.ip_address(host))  # that would be an interface of the other host
    except ValueError:
        return False


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 where the address is one of these."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
