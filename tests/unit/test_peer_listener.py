"""Workers of one host call each other at listeners: only at such, and only each other."""

import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from hashlib import sha256

import pytest
from torch.distributed import HashStore

from unisono.errors import LaunchError, NoProgress, WorkerLost
from unisono.membership.rendezvous import TorchRendezvousStore
from unisono.reduce.peers import PeerListener, Peers, limit, meet

pytestmark = pytest.mark.unit

PATIENCE_S = 20.0
MEETING = "generation 3"


def hello(rank: int, whom: int = 0, meeting: str = MEETING) -> bytes:
    return struct.pack("<ii16s", rank, whom, sha256(meeting.encode()).digest()[:16])


@contextmanager
def caller(listener: PeerListener, said: bytes) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(listener.address)
        if said:
            connection.send(said)
        yield connection


STRANGE = {
    "too short": b"abc",
    "a rank that is none": hello(-1),
    "a rank that does not call": hello(0),
    "a rank that is too large": hello(2),
    "one that wants another worker": hello(1, whom=1),
    "one of another job": hello(1, meeting="generation 3 elsewhere"),
}


@pytest.mark.parametrize("said", STRANGE.values(), ids=STRANGE.keys())
def test_who_does_not_belong_here_is_hung_up_on_and_the_others_are_met(said: bytes) -> None:
    with (
        closing(PeerListener(PATIENCE_S)) as listener,
        closing(PeerListener(PATIENCE_S)) as other,
        ThreadPoolExecutor(2) as pool,
        caller(listener, said) as stranger,
    ):
        first = pool.submit(listener.gather, 0, 2, (), MEETING)
        assert stranger.recv(1) == b""
        second = pool.submit(other.gather, 1, 2, [listener.address], MEETING)
        with closing(first.result(PATIENCE_S)) as ours, closing(second.result(PATIENCE_S)) as theirs:
            sending = pool.submit(ours.exchange, b"a")
            assert theirs.exchange(b"b") == sending.result(PATIENCE_S) == {0: b"a", 1: b"b"}


def test_who_calls_and_hangs_up_or_says_nothing_is_passed_over() -> None:
    with (
        closing(PeerListener(PATIENCE_S, hello_s=0.05)) as listener,
        closing(PeerListener(PATIENCE_S)) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        with caller(listener, b""):
            pass
        with caller(listener, b""):
            first = pool.submit(listener.gather, 0, 2, (), MEETING)
            with closing(other.gather(1, 2, [listener.address], MEETING)), closing(first.result(PATIENCE_S)) as met:
                assert met.ranks == [1]


def test_who_calls_twice_as_one_worker_is_one_worker() -> None:
    with (
        closing(PeerListener(PATIENCE_S)) as listener,
        caller(listener, hello(1)),
        caller(listener, hello(1)) as again,
        caller(listener, hello(2)),
        closing(listener.gather(0, 3, (), MEETING)) as met,
    ):
        assert met.ranks == [1, 2]
        assert again.recv(1) == b""


def test_strangers_do_not_make_the_wait_longer() -> None:
    with closing(PeerListener(0.3)) as listener, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.gather, 0, 2, (), MEETING)
        waiting.add_done_callback(lambda _: listener.close())  # or the last stranger would wait for an answer
        while not waiting.done():
            with suppress(OSError), caller(listener, b"abc") as stranger:
                stranger.recv(1)
        assert isinstance(waiting.exception(), NoProgress)


ADDRESSES = {
    "a file": b"/run/user/1000/bus",
    "another program": b"\0/tmp/.X11-unix/X0",
    "another kernel": b"\0unisono-" + b"f" * 16 + b"-" + b"0" * 32,
    "more": b"more",
    "nothing": b"",
}


@pytest.mark.parametrize("address", [*ADDRESSES.values()], ids=ADDRESSES.keys())
def test_an_address_that_is_no_door_of_this_host_is_not_called(address: bytes) -> None:
    with closing(PeerListener(PATIENCE_S)) as listener, pytest.raises(WorkerLost, match="where no worker is"):
        listener.gather(1, 2, [address])


SOMEBODY_ELSE = 2**31 - 7


def test_who_answers_as_another_user_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(PeerListener(PATIENCE_S)) as listener, closing(PeerListener(PATIENCE_S)) as other:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY_ELSE)
        with pytest.raises(WorkerLost, match="a process of another user answers in place of rank 0"):
            other.gather(1, 2, [listener.address], MEETING)
        connection, _ = listener._socket.accept()
        with closing(connection):
            assert connection.recv(1) == b""


@pytest.mark.parametrize("posted", ["zz", "\xe9", "abc", ""])
def test_what_is_posted_and_is_no_address_is_named_and_not_called(posted: str) -> None:
    store = HashStore()
    addresses = TorchRendezvousStore(store, PATIENCE_S)
    addresses._store.set("peer/0", posted)
    with pytest.raises(
        (LaunchError, WorkerLost), match="no address of a worker under the name peer/0|where no worker is"
    ):
        meet(1, 2, addresses, PATIENCE_S)


def test_what_others_sent_for_an_exchange_that_failed_is_not_taken_for_another_one() -> None:
    sockets = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    (late, first), (other, second) = sockets
    limit(first, 0.05)
    limit(second, PATIENCE_S)
    other.send(b"mof the first exchange")
    with closing(Peers(0, {1: first, 2: second})) as peers:
        with pytest.raises(NoProgress, match="waited for rank 1"):
            peers.exchange(b"")
        late.send(b"mof the first exchange")
        with pytest.raises(NoProgress, match="waited for rank 1"):
            peers.exchange(b"")
    late.close()
    other.close()
