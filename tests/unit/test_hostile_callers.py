"""A thousand callers that do not belong here take few descriptors and no threads, and keep nobody from being served."""

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from queue import SimpleQueue

import pytest

from rpc_endpoints import HOSTS, PATIENCE_S, Endpoints, Table, called, echo
from unisono.errors import Unreadable, WorkerLost
from unisono.received import is_same_user
from unisono.reduce.admission import MOST_STRANGERS, Admission, listen, present
from unisono.reduce.transport import Traffic
from unisono_lab.strategies.queued_work import RpcEndpoint
from unisono_lab.strategies.rpc_message import RpcConnection, RpcMessage

pytestmark = pytest.mark.unit

CALLERS = 1000
SECRET = "ab" * 32

Says = Callable[[socket.socket], None]


SAYINGS: dict[str, Says] = {
    "silence": lambda stranger: None,
    "goodbye": lambda stranger: stranger.close(),
    "garbage": lambda stranger: stranger.sendall(secrets.token_bytes(300)),
    "huge lengths": lambda stranger: stranger.sendall(struct.pack("!iQ", -1, 2**62)),
    "half a call": lambda stranger: stranger.sendall(struct.pack("<8si", b"unisono2", 1)),
    "no secret": lambda stranger: stranger.sendall(struct.pack("<8si32s", b"unisono2", 1, bytes(32)) + bytes(32)),
}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a path of each is not needed)


def open_ones(strangers: list[socket.socket]) -> int:
    return sum(stranger.fileno() >= 0 for stranger in strangers)


@contextmanager
def besieged(endpoint: RpcEndpoint) -> Iterator[list[socket.socket]]:
    """A worker that so many strangers have called."""
    with ExitStack() as opened:
        strangers = []
        for number in range(CALLERS):
            stranger = opened.enter_context(called(endpoint))
            with suppress(ConnectionError):  # dropped already
                [*SAYINGS.values()][number % len(SAYINGS)](stranger)
            strangers.append(stranger)
        yield strangers


@HOSTS
def test_a_thousand_strangers_take_few_descriptors_and_no_thread_and_workers_are_served(host: str) -> None:
    table = Table(3)
    with ExitStack() as opened:
        endpoints = [
            opened.enter_context(closing(RpcEndpoint(rank, host, echo, Traffic(), PATIENCE_S))) for rank in range(3)
        ]
        threads, before = threading.active_count(), descriptors()
        with besieged(endpoints[0]) as strangers, ThreadPoolExecutor(3) as pool:
            assert threading.active_count() == threads
            assert descriptors() - before - open_ones(strangers) <= MOST_STRANGERS + 1
            list(pool.map(lambda endpoint: endpoint.meet(table.gather(endpoint._rank)), endpoints))
            assert endpoints[1].ask({0: RpcMessage({"n": 1})})[0].values == {"n": 1, "to": 1}
            assert endpoints[0].ask({2: RpcMessage({"n": 2})})[2].values == {"n": 2, "to": 0}


def test_a_worker_that_is_dropped_among_strangers_calls_again() -> None:
    table, goes_on = Table(2), threading.Event()
    with ExitStack() as opened:
        endpoints = [
            opened.enter_context(closing(RpcEndpoint(rank, "", echo, Traffic(), PATIENCE_S))) for rank in range(2)
        ]

        def flood() -> int:
            count = 0
            while not goes_on.is_set():
                with ExitStack() as held, suppress(BlockingIOError):  # so many wait that the kernel takes no more
                    for _ in range(2 * MOST_STRANGERS):
                        held.enter_context(called(endpoints[0]))
                        count += 1
            return count

        with ThreadPoolExecutor(3) as pool:
            flooding = pool.submit(flood)
            try:
                list(pool.map(lambda endpoint: endpoint.meet(table.gather(endpoint._rank)), endpoints))
                assert endpoints[1].ask({0: RpcMessage({"n": 1})})[0].values == {"n": 1, "to": 1}
            finally:
                goes_on.set()
            assert flooding.result(PATIENCE_S) > 0


@pytest.mark.parametrize("says", ["silence", "half a call"])
@HOSTS
def test_a_stranger_that_says_too_little_is_hung_up_on_in_time(host: str, says: str) -> None:
    listening = listen(host)
    with (
        closing(Admission(listening, SECRET, lambda rank, connection: False, patience_s=0.1)) as admission,
        socket.socket(listening.family) as stranger,
    ):
        stranger.settimeout(PATIENCE_S)
        stranger.connect(listening.getsockname())
        SAYINGS[says](stranger)
        assert stranger.recv(1) == b""
        assert admission.strangers == 0


def test_who_has_waited_the_longest_makes_room() -> None:
    listening = listen("")
    with (
        closing(Admission(listening, SECRET, lambda rank, connection: False, most=2)),
        ExitStack() as opened,
    ):
        strangers = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for stranger in strangers:
            stranger.settimeout(PATIENCE_S)
            stranger.connect(listening.getsockname())
        assert strangers[0].recv(1) == b""
        for stranger in strangers[1:]:
            SAYINGS["half a call"](stranger)


def test_who_floods_a_worker_from_one_address_drops_nobody_who_calls_from_another() -> None:
    listening = listen("127.0.0.1")
    admitted: SimpleQueue[int] = SimpleQueue()

    def admit(rank: int, connection: socket.socket) -> bool:
        admitted.put(rank)
        return False

    with closing(Admission(listening, SECRET, admit, most=2)), ExitStack() as opened:
        worker = opened.enter_context(socket.socket())
        worker.settimeout(PATIENCE_S)
        worker.connect(listening.getsockname())
        strangers = [opened.enter_context(socket.socket()) for _ in range(10)]
        for stranger in strangers:
            stranger.bind(("127.0.0.2", 0))
            stranger.settimeout(PATIENCE_S)
            stranger.connect(listening.getsockname())
        assert [stranger.recv(1) for stranger in strangers[:-1]] == [b""] * 9
        present(worker, 3, SECRET)
        assert admitted.get(timeout=PATIENCE_S) == 3


def test_who_calls_twice_as_one_worker_is_heard_once() -> None:
    with Endpoints(2) as (first, second), called(second) as again:
        present(again, 0, second._secret)
        assert again.recv(1) == b""
        assert first.ask({1: RpcMessage()})[1].values == {"to": 0}


TELLS = [
    ["\0docker", SECRET],
    ["/run/user/1000/bus", SECRET],
    [["evil.example", 80], SECRET],
    [f"\0unisono-{'0' * 32}", "\ud800"],
    [f"\0unisono-{'0' * 32}"],
    None,
]
OF_ANOTHER_HOST = [[["evil.example", 80], SECRET], [["127.0.0.1", 0], SECRET], [["127.0.0.1", 2**40], SECRET]]


@pytest.mark.parametrize(
    ("host", "told"), [*(("", each) for each in TELLS), *(("127.0.0.1", each) for each in OF_ANOTHER_HOST)], ids=repr
)
def test_an_address_that_no_worker_has_is_not_called(host: str, told: object) -> None:
    with (
        closing(RpcEndpoint(0, host, echo, Traffic(), PATIENCE_S)) as endpoint,
        pytest.raises(Unreadable, match="rank 1: it announces"),
    ):
        endpoint.meet(lambda value: [value, told])


def test_who_answers_and_does_not_know_the_secret_is_told_nothing() -> None:
    with (
        Endpoints(2) as (first, _),
        closing(RpcEndpoint(1, "", echo, Traffic(), PATIENCE_S)) as endpoint,
        pytest.raises(WorkerLost, match="no worker of this generation"),
    ):
        endpoint.meet(lambda value: [[first.address, SECRET], value])


@pytest.mark.parametrize("end", ["caller", "called"])
def test_a_process_of_another_user_is_neither_heard_nor_told_anything(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Endpoints(2) as (first, second), called(first) as connection:
        assert is_same_user(connection)
        monkeypatch.setattr(os, "geteuid", lambda: 2**31 - 7)
        if end == "caller":
            with called(second) as stranger:
                assert stranger.recv(1) == b""
        else:
            with pytest.raises(OSError, match="another user"):
                present(connection, 1, first._secret)


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<IQ", 2**31, 0),
        struct.pack("<IQ", 2, 2**62) + b"{}",
        struct.pack("<IQ", 2, 0) + b"[]",
        struct.pack("<IQ", 4, 0) + b"\xff\xff\xff\xff",
        struct.pack("<IQ", 2**20, 0) + b"[" * 2**20,
    ],
    ids=["much text", "many tensors", "no object", "no text", "nested"],
)
def test_what_is_no_message_is_not_read(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(RpcConnection(ours)) as line, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(theirs.sendall, said)
        with pytest.raises(Unreadable):
            line.receive()
        sending.result(PATIENCE_S)
