"""The data network: connections between all workers of a generation, which nobody else can use, and few can read."""

from __future__ import annotations

import hmac
import json
import os
import platform
import queue
import secrets
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic

from unisono.errors import JobError, LaunchError, NoProgress, Unreadable, WorkerLost
from unisono.host.certificate import PINNED, NoCertificate, make
from unisono.received import parse_json, short
from unisono.reduce import admission
from unisono.reduce.peers import RendezvousStore, limit
from unisono.reduce.wire import Wire

LARGEST_PEM = 2**14
"""Bytes of a certificate and its key."""

UNDER_WAY = 4 * 2**20
"""Bytes on their way through a Unix socket, as far as the system allows it: TCP finds its own number."""

_CERTIFICATE_ENDS = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class NetworkKeys:
    """The secrets of the workers of a generation.

    Attributes:
        secret: the text by which callers are recognised.
        pem: a certificate and its private key, which all of them show and expect; empty to speak plaintext.
    """

    secret: str
    pem: str = ""

    @classmethod
    def plain(cls) -> NetworkKeys:
        """New ones without a certificate."""
        return cls(secrets.token_hex(32))

    @classmethod
    def private(cls) -> NetworkKeys:
        """New ones.

        Raises:
            JobError: this host cannot make a certificate.
        """
        return cls(secrets.token_hex(32), _new_pem())

    @classmethod
    def unpacked(cls, data: bytes) -> NetworkKeys:
        """From what :meth:`packed` returned.

        Raises:
            LaunchError: it is something else.
        """
        with suppress(Unreadable, ssl.SSLError, ValueError):
            match parse_json(data):
                case [str(secret), str(pem)] if secret.isascii() and pem.isascii() and len(pem) <= LARGEST_PEM:
                    keys = cls(secret, pem)
                    keys.context(calls=False)
                    return keys
        raise LaunchError("rank 0 has told something else than the keys of the network between the workers")

    def packed(self) -> bytes:
        """As bytes."""
        return json.dumps([self.secret, self.pem]).encode()

    def of(self, scope: str) -> NetworkKeys:
        """Those of some workers that meet: others, with the same keys, are not taken for them."""
        return replace(self, secret=hmac.digest(self.secret.encode(), scope.encode(), "sha256").hex())

    def secret_of(self, rank: int) -> str:
        """Return the secret that callers of this worker show, and callers of no other worker."""
        return hmac.digest(self.secret.encode(), f"worker {rank}".encode(), "sha256").hex()

    def context(self, *, calls: bool) -> ssl.SSLContext | None:
        """TLS 1.3 with the one certificate that both sides show; None for plaintext.

        Raises:
            ssl.SSLError: it is no certificate with its key.
        """
        if not self.pem:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if calls else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # who holds the key belongs here, wherever it is
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= PINNED
        certificate, end, _ = self.pem.partition(_CERTIFICATE_ENDS)
        context.load_verify_locations(cadata=f"{certificate}{end}\n")
        if not calls:
            context.num_tickets = 0  # nobody comes back
        with _unnamed_file(self.pem.encode()) as path:
            context.load_cert_chain(path)
        return context


def write_keys(path: Path) -> None:
    """Make keys, in a new file that only this user can read.

    Raises:
        JobError: there is such a file, it cannot be written, or this host cannot make a certificate.
    """
    pem = _new_pem()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(pem)
    except OSError as error:
        raise JobError(f"the keys cannot be written to {path}: {error.strerror}") from error


def _new_pem() -> str:
    with tempfile.TemporaryDirectory(prefix="unisono-keys-") as folder:
        try:
            made = make(Path(folder), "unisono worker")
        except NoCertificate as error:
            raise JobError(
                f"workers of several hosts speak TLS, and on host {platform.node()} {error}: install openssl, or let "
                f"gradients travel in plain text with --insecure-data or "
                f"unisono.init(communication={{'insecure_data': True}}), in a "
                f"network that only this job's hosts are in"
            ) from error
        return made.chain.read_text("ascii") + made.key.read_text("ascii")


def keys_from(path: Path, scope: str) -> NetworkKeys:
    """Keys from a file with a certificate and its private key, PEM, which all hosts have.

    Raises:
        JobError: it cannot be read, others can read it, or it holds something else; says what to do.
    """
    try:
        with path.open(encoding="ascii") as file:
            mode, pem = os.fstat(file.fileno()).st_mode, file.read(LARGEST_PEM)
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"the keys of the network between the hosts cannot be read: {error}") from error
    if mode & 0o077:
        raise JobError(f"others can read the keys in {path}: chmod 600 it, or make other ones with `unisono keys`")
    keys = NetworkKeys(hmac.digest(pem.encode(), scope.encode(), "sha256").hex(), pem)
    try:
        if keys.context(calls=False) is None:
            raise ValueError("it is empty")
    except (ssl.SSLError, ValueError) as error:
        raise JobError(f"{path} holds no certificate with its key ({error}): make one with `unisono keys`") from error
    return keys


def connect_all(
    rank: int, host: str, workers: int, board: RendezvousStore, keys: NetworkKeys, timeout_s: float
) -> list[Wire]:
    """Connect with all other workers of a generation.

    Each of them listens until all have met, and hangs up on callers that do not know the generation's secret. Over TLS,
    both sides also have to hold its private key. On Unix sockets, the kernel says that both belong to one user.
    ``host`` is the address at which the others call this worker; empty if all of them are on one host. ``board`` is a
    store that only they use.

    Returns:
        the connections to the others, in the order of ranks.

    Raises:
        WorkerLost: a worker is gone, or somebody else answers in its place.
        NoProgress: a worker did not appear in time.
    """
    return _Meeting(rank, host, workers, board, keys, timeout_s).connect()


class _Meeting:
    """Workers on their way to each other."""

    def __init__(
        self, rank: int, host: str, workers: int, board: RendezvousStore, keys: NetworkKeys, timeout_s: float
    ) -> None:
        self._rank, self._host, self._workers = rank, host, workers
        self._board, self._keys, self._timeout_s = board, keys, timeout_s
        self._server_context, self._client_context = keys.context(calls=False), keys.context(calls=True)
        self._admitted: set[int] = set()
        self._callers: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()

    def connect(self) -> list[Wire]:
        sockets: dict[int, socket.socket] = {}
        with ExitStack() as opened, ExitStack() as failed:
            listening = admission.listen(self._host)
            address = admission.address_of(listening)
            doorkeeper = admission.Admission(listening, self._keys.secret_of(self._rank), self._admit)
            opened.callback(self._turn_away)
            opened.callback(doorkeeper.close)
            self._board.post(f"data/{self._rank}", json.dumps(address).encode())
            for other in range(self._rank):
                sockets[other] = self._called(other)
                failed.callback(sockets[other].close)
            until = monotonic() + self._timeout_s
            while len(sockets) < self._workers - 1:
                other, caller = self._next(until)
                failed.callback(caller.close)
                sockets[other] = caller
            failed.pop_all()
        return [Wire(sockets[other], f"rank {other}") for other in sorted(sockets)]

    def _called(self, other: int) -> socket.socket:
        address = self._address_from(other, self._board.read(f"data/{other}"))
        try:
            return admission.call_again(partial(self._call, other, address), self._timeout_s)
        except ConnectionRefusedError as error:
            raise WorkerLost(f"rank {self._rank} found rank {other} gone: nobody listens at {address}") from error
        except (OSError, EOFError) as error:
            raise self._lost(other, error) from error

    def _address_from(self, rank: int, data: bytes) -> admission.Address:
        match parse_json(data):
            case [str(host), int(port)] if self._host and admission.is_host(host) and 0 < port < 2**16:
                return host, port
            case str(name) if not self._host and admission.is_name(name):
                return name
        raise WorkerLost(f"rank {rank} says that it can be called at {short(data)}, which is no address of a worker")

    def _call(self, other: int, address: admission.Address) -> socket.socket:
        connection = admission.calling(address)
        try:
            limit(connection, self._timeout_s)
            connection.connect(address)
            admission.present(connection, self._rank, self._keys.secret_of(other))
            return self._greeted(connection, self._client_context, self._rank, other)
        except (OSError, EOFError):
            connection.close()
            raise

    def _next(self, until: float) -> tuple[int, socket.socket]:
        """The next worker that calls, and has shown that it belongs here."""
        while True:
            try:
                other, caller = self._callers.get(timeout=max(0.0, until - monotonic()))
            except queue.Empty:
                raise NoProgress(
                    f"rank {self._rank} on host {platform.node()} waited in vain for the other workers to call"
                ) from None
            try:
                return other, self._greeted(caller, self._server_context, other, self._rank)
            except (OSError, EOFError) as error:
                caller.close()
                raise self._lost(other, error) from error

    def _greeted(
        self, connection: socket.socket, context: ssl.SSLContext | None, caller: int, called: int
    ) -> socket.socket:
        connection.settimeout(min(admission.PATIENCE_S, self._timeout_s))
        if self._host:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNDER_WAY)
        if context is not None:
            connection = context.wrap_socket(connection, server_side=context is self._server_context)
        admission.identify(connection, caller, called)
        return connection

    def _admit(self, rank: int, connection: socket.socket) -> bool:
        """On the thread of the admission."""
        if rank in self._admitted or not self._rank < rank < self._workers:
            return False
        self._admitted.add(rank)
        self._callers.put((rank, connection))
        return True

    def _turn_away(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._callers.get_nowait()[1].close()

    def _lost(self, other: int, error: Exception) -> WorkerLost:
        if isinstance(error, TimeoutError | BlockingIOError):
            return NoProgress(f"rank {self._rank} on host {platform.node()} waited for rank {other} in vain")
        return WorkerLost(f"rank {self._rank} on host {platform.node()} could not connect with rank {other}: {error}")


@contextmanager
def _unnamed_file(data: bytes) -> Iterator[str]:
    """A path to a file that lies in memory alone: TLS reads keys from nowhere else."""
    descriptor = os.memfd_create("unisono", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
