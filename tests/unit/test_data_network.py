"""The network between workers: nobody without its keys can read it, add to it, or keep workers from meeting."""

import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from network_keys import private
from unisono.errors import JobError, LaunchError, NoProgress, WorkerLost
from unisono.reduce.admission import MOST_STRANGERS, Address, Impostor, address_of, calling, identify, listen, receive
from unisono.reduce.data_network import NetworkKeys, connect_all, keys_from, write_keys
from unisono.reduce.wire import Broken, SocketGroup, SocketWork, Wire

pytestmark = pytest.mark.unit

PATIENCE_S = 20.0
HERE = "127.0.0.1"
PLAIN = NetworkKeys.plain()
CALL, ANSWER, PROOF = 44, 64, 32
"""Bytes of what a caller and the one who is called say by turns."""

KEYS = pytest.mark.parametrize("kind", ["plain", "tls", "one host"])
WORKERS = pytest.mark.parametrize("workers", [2, 3, 5])


def keys_of(kind: str) -> NetworkKeys:
    return private() if kind == "tls" else PLAIN


def at(value: bytes) -> Address:
    """Where a worker says that it can be called."""
    found = json.loads(value)
    return found if isinstance(found, str) else (found[0], found[1])


class Board:
    """Where workers that are threads find each other, and where strangers may change what they find."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.altered: Callable[[str, bytes], bytes] = lambda name, value: value

    def post(self, name: str, value: bytes) -> None:
        self._store.set(name, self.altered(name, value).hex())

    def read(self, name: str) -> bytes:
        return bytes.fromhex(self._store.get(name).decode())


@contextmanager
def meeting(
    workers: int,
    keys: Sequence[NetworkKeys],
    board: Board | None = None,
    timeout_s: float = PATIENCE_S,
    host: str = HERE,
) -> Iterator[list[Future[list[Wire]]]]:
    """So many workers on their way to each other; each may have keys of its own."""
    board = board or Board()
    with ThreadPoolExecutor(workers) as pool:
        found = [
            pool.submit(connect_all, rank, host, workers, board, keys[rank % len(keys)], timeout_s)
            for rank in range(workers)
        ]
        try:
            yield found
        finally:
            for one in found:
                if one.exception(2 * PATIENCE_S) is None:
                    for wire in one.result():
                        wire.close()


@contextmanager
def groups(
    workers: int, kind: str, board: Board | None = None, timeout_s: float = PATIENCE_S
) -> Iterator[list[SocketGroup]]:
    """So many workers that have met."""
    host = "" if kind == "one host" else HERE
    with meeting(workers, [keys_of(kind)], board, host=host) as found, ExitStack() as opened:
        yield [
            opened.enter_context(closing(SocketGroup(rank, one.result(PATIENCE_S), timeout_s)))
            for rank, one in enumerate(found)
        ]


def on_all(groups: Sequence[SocketGroup], work: Callable[[SocketGroup, int], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups, range(len(groups))))


def wait_for(works: Sequence[SocketWork]) -> None:
    for work in works:
        work.wait()


@KEYS
@WORKERS
def test_rows_sums_and_broadcasts_arrive(workers: int, kind: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(workers, 100_001)
    with groups(workers, kind) as all_of_them:
        for length in (0, 1, 100_001):

            def gathered(group: SocketGroup, rank: int, length: int = length) -> Tensor:
                found = torch.empty(workers, length)
                group._allgather_base(found.view(-1), rows[rank, :length].clone()).wait()
                return found

            assert all(torch.equal(found, rows[:, :length]) for found in on_all(all_of_them, gathered))
        for source in range(workers):

            def told(group: SocketGroup, rank: int, source: int = source) -> Tensor:
                found = rows[rank].clone()
                group.broadcast(found, source).wait()
                return found

            assert all(torch.equal(found, rows[source]) for found in on_all(all_of_them, told))

        def added(group: SocketGroup, rank: int) -> Tensor:
            found = rows[rank].clone()
            group.allreduce([found]).wait()
            return found

        expected = rows[0].clone()
        for row in rows[1:]:
            expected += row
        assert all(torch.equal(found, expected) for found in on_all(all_of_them, added))


@KEYS
def test_tensors_go_to_where_their_tag_is_expected_in_whatever_order(kind: str) -> None:
    sent = [torch.full((size,), float(tag)) for tag, size in enumerate((300_000, 0, 5, 40_000, 7))]
    with groups(2, kind) as (one, other):
        leaving = [one.send([tensor], 1, tag) for tag, tensor in enumerate(sent)]
        found = [torch.empty_like(tensor) for tensor in sent]
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(wait_for, leaving)
            arriving = [other.recv([found[tag]], 0, tag) for tag in (3, 1, 4, 0, 2)]
            for work in arriving:
                work.wait()
            left.result(PATIENCE_S)
        assert all(torch.equal(got, tensor) for got, tensor in zip(found, sent, strict=True))


@KEYS
def test_a_tensor_of_another_length_is_no_tensor(kind: str) -> None:
    with groups(2, kind) as (one, other):
        one.send([torch.zeros(3)], 1, 7)
        with pytest.raises(Broken, match="rank 0 is broken: it sends 12 bytes as number 7, where 16 are expected"):
            other.recv([torch.zeros(4)], 0, 7).wait()


@KEYS
def test_whoever_waits_for_a_worker_that_sends_nothing_gives_up(kind: str) -> None:
    with groups(2, kind, timeout_s=0.05) as (one, _), pytest.raises(RuntimeError, match="timed out after 0.05 s"):
        one.recv([torch.zeros(1)], 1, 0).wait()


@KEYS
def test_to_hang_up_wakes_whoever_waits_here_and_there(kind: str) -> None:
    with groups(3, kind) as (one, two, three), ThreadPoolExecutor(2) as pool:
        waiting = threading.Barrier(3, timeout=PATIENCE_S)

        def wait(group: SocketGroup, peer: int) -> None:
            work = group.recv([torch.zeros(1)], peer, 0)
            waiting.wait()
            work.wait()

        ends = [pool.submit(wait, one, 1), pool.submit(wait, two, 0)]
        waiting.wait()
        one.abort()
        assert all(isinstance(end.exception(PATIENCE_S), Broken) for end in ends)
        with pytest.raises(Broken, match="this worker hangs up"):
            one.send([torch.zeros(1)], 2, 0)
        with pytest.raises(Broken):
            three.recv([torch.zeros(1)], 0, 0).wait()


# --- outsiders


def first_words(stranger: socket.socket) -> None:
    stranger.sendall(struct.pack("<8si32s", b"unisono2", 1, bytes(32)) + bytes(32))


def tls_hello(stranger: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(into, out).do_handshake()
    stranger.sendall(out.read())


def goodbye(stranger: socket.socket) -> None:
    stranger.sendall(b"unisono2")
    stranger.close()


def replayed(heard: bytes, stranger: socket.socket) -> None:
    """As the caller has done it in another generation, up to the middle of TLS."""
    assert heard.startswith(b"unisono2")
    stranger.sendall(heard[:CALL])
    receive(stranger, ANSWER)  # another one than what was heard
    stranger.sendall(heard[CALL + ANSWER : CALL + ANSWER + PROOF] + heard[CALL + ANSWER + PROOF + 1 :][:300])
    assert stranger.recv(1) == b""  # or it is reset


SAYINGS: list[Callable[[socket.socket], None]] = [
    lambda stranger: None,
    lambda stranger: stranger.sendall(bytes(range(256)) * 4),
    first_words,
    tls_hello,
    goodbye,
]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@KEYS
def test_workers_meet_among_strangers_that_hold_connections_and_replay_what_others_have_said(kind: str) -> None:
    strangers: list[socket.socket] = []
    board, older = Board(), Board()
    with Between() as outsider:
        older.altered = outsider
        with groups(2, kind, older):
            heard = bytes(outsider.heard)
    sayings: list[Callable[[socket.socket], None]] = [*SAYINGS, partial(replayed, heard)]

    def called(name: str, value: bytes) -> bytes:  # a worker listens, and others do not know it yet
        for number in range(4 * MOST_STRANGERS):
            with suppress(OSError, EOFError):
                strangers.append(stranger := calling(address := at(value)))
                stranger.settimeout(PATIENCE_S)
                stranger.connect(address)
                sayings[number % len(sayings)](stranger)
        return value

    board.altered, before = called, descriptors()
    try:
        with groups(3, kind, board) as all_of_them:
            assert len(strangers) == 3 * 4 * MOST_STRANGERS
            assert descriptors() - before - sum(one.fileno() >= 0 for one in strangers) == 3 * 2

            def added(group: SocketGroup, rank: int) -> Tensor:
                found = torch.full((1000,), float(rank))
                group.allreduce([found]).wait()
                return found

            assert all(torch.equal(found, torch.full((1000,), 3.0)) for found in on_all(all_of_them, added))
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_worker_with_the_keys_of_another_generation_is_turned_away() -> None:
    older, newer = private().of("generation 3"), private().of("generation 4")
    with meeting(2, [newer, older], timeout_s=1.0) as (first, second):
        assert isinstance(second.exception(PATIENCE_S), WorkerLost)
        assert isinstance(first.exception(PATIENCE_S), NoProgress)


@pytest.mark.parametrize("speaks", ["another certificate", "plain text"])
def test_a_worker_with_the_secret_alone_is_turned_away(speaks: str) -> None:
    secret = private().secret
    forged = NetworkKeys(secret) if speaks == "plain text" else replace(NetworkKeys.private(), secret=secret)
    with meeting(2, [private(), forged], timeout_s=1.0) as found:
        assert all(isinstance(one.exception(PATIENCE_S), WorkerLost) for one in found)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (HERE, b'["example.org", 443]'),
        (HERE, b'"\\u0000unisono-00000000000000000000000000000000"'),
        ("", b'["127.0.0.1", 443]'),
        ("", b'"/run/somebody/socket"'),
    ],
)
def test_an_address_that_is_none_is_not_called(host: str, told: bytes) -> None:
    board = Board()
    board.altered = lambda name, value: told
    with meeting(2, [PLAIN], board, timeout_s=0.5, host=host) as (_, second):
        assert "which is no address of a worker" in str(second.exception(PATIENCE_S))


class Between:
    """An outsider on the way between two workers, who keeps what it hears, and may change it."""

    def __init__(self, changes: Callable[[int, bytes], bytes] = lambda passed, data: data) -> None:
        self.heard = bytearray()
        self._changes, self._passed = changes, 0
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __call__(self, name: str, value: bytes) -> bytes:
        address = at(value)
        listening = listen("" if isinstance(address, str) else HERE)
        self._open.append(listening)
        self._start(self._connect, listening, address)
        return json.dumps(address_of(listening)).encode()

    def _start(self, work: Callable[..., None], *args: object) -> None:
        self._threads.append(thread := threading.Thread(target=work, args=args))
        thread.start()

    def _connect(self, listening: socket.socket, address: Address) -> None:
        with suppress(OSError):
            while True:
                caller, _ = listening.accept()
                called = calling(address)
                called.connect(address)
                self._open += [caller, called]
                self._start(self._pass_on, caller, called)
                self._start(self._pass_on, called, caller)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                self.heard += data
                data = self._changes(self._passed, data)
                self._passed += len(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> "Between":
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in self._open:
            each.close()


def exchanged(all_of_them: Sequence[SocketGroup]) -> list[Tensor]:
    def broadcast(group: SocketGroup, rank: int) -> Tensor:
        found = torch.full((50_000,), 1.2345 if rank == 0 else 0.0)
        group.broadcast(found, 0).wait()
        return found

    return on_all(all_of_them, broadcast)


@pytest.mark.parametrize(("kind", "can_read"), [("plain", True), ("tls", False)])
def test_an_outsider_on_the_way_cannot_read_what_goes_over_tls(kind: str, can_read: bool) -> None:
    board = Board()
    with Between() as outsider:
        board.altered = outsider
        with groups(2, kind, board) as all_of_them:
            assert all(torch.equal(found, torch.full((50_000,), 1.2345)) for found in exchanged(all_of_them))
        assert len(outsider.heard) > 200_000
        assert (struct.pack("<4f", *[1.2345] * 4) in bytes(outsider.heard)) is can_read


@pytest.mark.parametrize("place", [3000, 50_000, 150_000])
def test_a_bit_that_an_outsider_changes_on_the_way_breaks_the_connection_and_becomes_no_value(place: int) -> None:
    def changed(passed: int, data: bytes) -> bytes:
        if passed <= place < passed + len(data):
            altered = bytearray(data)
            altered[place - passed] ^= 1
            return bytes(altered)
        return data

    board = Board()
    with Between(changed) as outsider:
        board.altered = outsider
        with groups(2, "tls", board) as all_of_them, pytest.raises(Broken):
            exchanged(all_of_them)


def test_two_connections_that_an_outsider_has_put_together_are_noticed() -> None:
    keys = private()
    one, other = socket.socketpair(socket.AF_UNIX)
    with ThreadPoolExecutor(1) as pool:

        def says(connection: socket.socket, calls: bool, ends: tuple[int, int]) -> None:
            context = keys.context(calls=calls)
            assert context is not None
            connection.settimeout(PATIENCE_S)
            with context.wrap_socket(connection, server_side=not calls) as encrypted:
                identify(encrypted, *ends)

        heard = pool.submit(says, one, False, (2, 0))
        with pytest.raises(Impostor, match="another worker is at its other end"):
            says(other, True, (1, 0))
        assert isinstance(heard.exception(PATIENCE_S), Impostor | OSError | EOFError)


# --- keys


def test_keys_from_a_file_are_the_same_for_all_who_have_it_and_others_for_other_scopes(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.pem")
    assert (tmp_path / "keys.pem").stat().st_mode & 0o777 == 0o600
    assert keys_from(tmp_path / "keys.pem", "a") == keys_from(tmp_path / "keys.pem", "a")
    assert keys_from(tmp_path / "keys.pem", "a").secret != keys_from(tmp_path / "keys.pem", "b").secret
    with pytest.raises(JobError, match="cannot be written .*File exists"):
        write_keys(tmp_path / "keys.pem")
    (tmp_path / "keys.pem").chmod(0o640)
    with pytest.raises(JobError, match=r"others can read the keys in .*chmod 600"):
        keys_from(tmp_path / "keys.pem", "a")


@pytest.mark.parametrize("text", ["", "no keys", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "é"])
def test_a_file_without_keys_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.pem"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(JobError, match="unisono keys|cannot be read"):
        keys_from(path, "a")
    with pytest.raises(JobError, match="cannot be read"):
        keys_from(tmp_path / "nowhere", "a")


@pytest.mark.parametrize(
    "told", [b"[]", b"{}", b'["a"]', b'["a", 1]', b'["a", "no certificate"]', '["é", ""]'.encode(), b"x"]
)
def test_keys_that_are_told_are_checked(told: bytes) -> None:
    with pytest.raises(LaunchError, match="rank 0 has told something else"):
        NetworkKeys.unpacked(told)
    keys = private()
    assert NetworkKeys.unpacked(keys.packed()) == keys
