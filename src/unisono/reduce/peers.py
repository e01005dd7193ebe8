"""Sockets between the workers of one host: small messages, file descriptors, and the news that a peer is gone."""

import platform
import re
import secrets
import socket
import struct
from collections.abc import Iterable
from contextlib import ExitStack, closing, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Protocol

from unisono.errors import NoProgress, WorkerLost
from unisono.received import is_same_user, short

LARGEST_MESSAGE = 32 * 1024
"""Bytes that always fit into a socket's buffer, so that everybody may send before anybody receives."""

MOST_CALLERS = 1024
"""The most callers that may wait at a listener."""

HELLO_S = 5.0
"""Seconds that a caller may take to send its rank, which is its first message."""

_MARK = b"m"
"""Before every message: an empty one would look like the end of the connection."""

_LARGEST = len(_MARK) + LARGEST_MESSAGE

_HELLO = struct.Struct("<ii16s")  # who calls, who is called, and the digest of what they meet for
_FORM = re.compile(rb"\0unisono-(?:[0-9a-f]{16}-)?[0-9a-f]{32}")  # with what the addresses of one kernel have in common
_TIME = struct.Struct("ll")  # a timeval


class Peers:
    """The connected sockets to every other worker of this host.

    A receiver blocks in the kernel: it takes no processor time, and wakes at once when the peer sends or dies.

    Attributes:
        waits: whether this worker is in the middle of an exchange.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.waits = False
        self._sockets = dict(sorted(sockets.items()))
        self.ranks = list(self._sockets)
        self._failed: WorkerLost | None = None

    def exchange(self, message: bytes) -> dict[int, bytes]:
        """Send a message to everybody and receive everybody's.

        A message has ``LARGEST_MESSAGE`` bytes at most. Return everybody's by rank, this worker's own among them.

        Raises:
            WorkerLost: a peer is gone.
            NoProgress: a peer gave no sign in time. Either is raised again from then on: what others have sent for the
                exchange that failed must not be taken for what they send for another one.
        """
        assert len(message) <= LARGEST_MESSAGE
        if self._failed is not None:
            raise self._failed
        marked, messages, self.waits = _MARK + message, {self.rank: message}, True
        try:
            for rank, peer in self._sockets.items():  # noqa: B007 (an error names it)
                peer.send(marked)
            for rank, peer in self._sockets.items():
                if not (received := peer.recv(_LARGEST)):
                    raise self._lost(rank)
                messages[rank] = received[len(_MARK) :]
        except OSError as error:
            raise self._failure(rank, error) from error
        finally:
            self.waits = False
        return messages

    def exchange_descriptors(self, descriptor: int) -> dict[int, int]:
        """Give everybody an open file, and receive everybody's: new descriptors, by rank."""
        if self._failed is not None:
            raise self._failed
        descriptors: dict[int, int] = {}
        try:
            for rank, peer in self._sockets.items():  # noqa: B007 (an error names it)
                socket.send_fds(peer, [_MARK], [descriptor])
            for rank, peer in self._sockets.items():
                _, received, _, _ = socket.recv_fds(peer, len(_MARK), 1)
                if not received:
                    raise self._lost(rank)
                descriptors[rank] = received[0]
        except OSError as error:
            raise self._failure(rank, error) from error
        return descriptors

    def close(self) -> None:
        """Hang up: all that wait for this worker wake."""
        self.hang_up()
        for peer in self._sockets.values():
            peer.close()

    def hang_up(self) -> None:
        """Wake all that wait for this worker, and all that wait in this process. Any thread may call it."""
        for peer in self._sockets.values():
            with suppress(OSError):  # a peer that is gone
                peer.shutdown(socket.SHUT_RDWR)

    def _failure(self, rank: int, error: OSError) -> WorkerLost:
        if not isinstance(error, BlockingIOError):
            return self._lost(rank)
        self._failed = NoProgress(
            f"rank {self.rank} of host {platform.node()} waited for rank {rank} of the same host in vain. It hangs, or "
            f"takes longer for something than the others: see its log, or allow more with "
            f"unisono.init(faults={{'timeout_s': …}})"
        )
        return self._failed

    def _lost(self, rank: int) -> WorkerLost:
        self._failed = WorkerLost(
            f"rank {self.rank} lost rank {rank}: its end of the connection is closed. See its log"
        )
        return self._failed


LOOK_S = 0.1
"""Seconds between two checks of a listener for which somebody waits."""


class PeerListener:
    """The socket at which this worker waits for the others of its host. It has no name in the file system.

    Args:
        timeout_s: the longest wait for a peer, here and in every exchange, in seconds.
        hello_s: the longest time that a caller may take to say who it is, in seconds.
    """

    def __init__(self, timeout_s: float, hello_s: float = HELLO_S) -> None:
        self._timeout_s, self._hello_s = timeout_s, min(timeout_s, hello_s)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        self._socket.bind(f"\0{_common()}{secrets.token_hex(16)}")
        self._socket.listen(MOST_CALLERS)

    @property
    def address(self) -> bytes:
        """Where to call."""
        address: bytes = self._socket.getsockname()
        return address

    def gather(self, rank: int, workers: int, lower: Iterable[bytes], purpose: str = "") -> Peers:
        """Connect with every other worker. Processes of another user are neither heard nor called.

        ``lower`` are the addresses of the workers of lower rank, in order: this worker calls them, and the others call
        this worker. ``purpose`` is a text that all of them share, so that workers of this user's other jobs are not
        taken for them.

        Raises:
            WorkerLost: a peer is gone, or somebody else is where it should be, or this listener was closed meanwhile.
            NoProgress: a peer did not appear in time.
        """
        about = sha256(purpose.encode()).digest()[:16]
        sockets: dict[int, socket.socket] = {}
        with ExitStack() as calls:
            for other, address in enumerate(lower):
                sockets[other] = calls.enter_context(self._call(address, _HELLO.pack(rank, other, about)))
            until = monotonic() + self._timeout_s
            while len(sockets) < workers - 1:
                caller = calls.enter_context(self._next_caller(rank, until))
                other_rank = self._rank_of(caller, rank, about)
                if other_rank is not None and other_rank in range(rank + 1, workers) and other_rank not in sockets:
                    sockets[other_rank] = caller
                else:
                    caller.close()
            calls.pop_all()
        return Peers(rank, sockets)

    def close(self) -> None:
        """Wake all that wait at the listener, and accept nobody any more. Any thread may call it, also twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _call(self, address: bytes, hello: bytes) -> socket.socket:
        rank, other, _ = _HELLO.unpack(hello)
        if not _is_door(address):
            raise WorkerLost(
                f"rank {rank} of this host is told to find rank {other} where no worker is: {short(address)}"
            )
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            limit(caller, self._timeout_s)
            caller.connect(address)
            if not is_same_user(caller):
                raise PermissionError(f"a process of another user answers in place of rank {other}")
            caller.send(hello)
        except OSError as error:
            caller.close()
            raise WorkerLost(f"rank {rank} of this host found another one gone: {error}. See its log") from error
        return caller

    def _next_caller(self, rank: int, until: float) -> socket.socket:
        # A caller that is turned away does not make the wait for the others longer.
        while (left := until - monotonic()) > 0:
            try:
                # A socket that another thread closes while this one waits may leave it waiting for the next that gets
                # the same number: so it looks again and again, and then finds it closed.
                self._socket.settimeout(min(left, LOOK_S))
                caller, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                raise WorkerLost(f"rank {rank} of this host stopped waiting for the others: {error}") from error
            return caller
        raise NoProgress(f"rank {rank} of host {platform.node()} waited in vain for the others to call")

    def _rank_of(self, caller: socket.socket, rank: int, about: bytes) -> int | None:
        """The rank of a caller; None for one that does not belong here."""
        try:
            limit(caller, self._hello_s)
            hello = caller.recv(_HELLO.size) if is_same_user(caller) else b""
            limit(caller, self._timeout_s)
        except OSError:  # it says nothing, or has hung up
            return None
        caller_rank, called_rank, purpose = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (None, None, b"")
        return caller_rank if (called_rank, purpose) == (rank, about) else None


def address_from(text: str) -> bytes:
    """Read the address of a listener in hex; empty, so that nobody can call it, if the text is no address."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def is_within_call(ours: bytes, theirs: bytes) -> bool:
    """Whether listeners with these addresses are on one host, whatever the hosts are called."""
    length = len(_common()) + 1
    return ours[:length] == theirs[:length]


def _is_door(address: bytes) -> bool:
    return _FORM.fullmatch(address) is not None and is_within_call(f"\0{_common()}".encode(), address)


@cache
def _common() -> str:
    """The common part of addresses whose listeners can call each other: one kernel, and one network namespace."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # then the host's name has to do
        return "unisono-"
    return f"unisono-{sha256(f'{kernel} {network}'.encode()).hexdigest()[:16]}-"


def meet(rank: int, workers: int, addresses: "RendezvousStore", timeout_s: float, purpose: str = "") -> Peers:
    """Connect every worker of this host with every other.

    They post the addresses of their listeners in ``addresses``. ``purpose`` is that of :meth:`PeerListener.gather`.

    Raises:
        WorkerLost: a peer is gone, or somebody else is where it should be.
        NoProgress: a peer did not appear in time.
    """
    with closing(PeerListener(timeout_s)) as listener:
        addresses.post(f"peer/{rank}", listener.address)
        return listener.gather(rank, workers, (addresses.read(f"peer/{other}") for other in range(rank)), purpose)


class RendezvousStore(Protocol):
    """A store in which workers post their addresses for the others."""

    def post(self, name: str, value: bytes) -> None:
        """Make a value known."""

    def read(self, name: str) -> bytes:
        """A value, as soon as somebody has posted it."""


def limit(connection: socket.socket, timeout_s: float) -> None:
    """Limit waits for the other side: they end with ``BlockingIOError``, if nothing moves for so many seconds.

    It is the kernel's own limit: Python's would cost a system call more for every message.
    """
    connection.settimeout(None)
    whole = int(timeout_s)
    limit = _TIME.pack(whole, max(1, int((timeout_s - whole) * 1e6)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
