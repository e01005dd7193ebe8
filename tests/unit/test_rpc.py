"""Workers ask each other, one at a time or several at once; whoever hangs up wakes everybody."""

import json
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_endpoints import HOSTS, PATIENCE_S, Endpoints, Table, called, echo
from unisono.errors import NoProgress, UnisonoError, WorkerLost
from unisono.reduce.admission import Impostor, address_of, greet, listen, present, receive
from unisono.reduce.buckets import pack, unpack
from unisono.reduce.transport import Traffic
from unisono_lab.strategies.queued_work import RpcEndpoint
from unisono_lab.strategies.rpc_message import RpcConnection, RpcMessage

pytestmark = pytest.mark.unit


@HOSTS
def test_the_one_who_is_asked_answers_with_words_and_tensors(host: str) -> None:
    tensors = [torch.randn(3, 5), torch.arange(7), torch.tensor(2.5, dtype=torch.bfloat16)]
    with Endpoints(2, host) as (first, second):
        found = first.ask({1: RpcMessage({"a": [1, None, "é"]}, pack(tensors))})[1]
        assert found.values == {"a": [1, None, "é"], "to": 0}
        for got, expected in zip(unpack(found.packed, tensors), tensors, strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
        assert second.ask({0: RpcMessage()})[0].values == {"to": 1}


def test_several_are_asked_at_once_with_more_than_fits_into_a_socket() -> None:
    large = torch.randint(0, 255, (4_000_000,), dtype=torch.uint8)

    def asked(endpoint: RpcEndpoint) -> bool:
        others = {rank: RpcMessage({"n": rank}, large) for rank in range(3) if rank != endpoint._rank}
        answers = endpoint.ask(others)
        return all(torch.equal(answers[rank].packed, large) and answers[rank].values["n"] == rank for rank in others)

    with Endpoints(3) as endpoints, ThreadPoolExecutor(3) as pool:  # all at once, too
        assert all(pool.map(asked, endpoints))


def test_questions_are_answered_while_another_ones_is_thought_about() -> None:
    asked, done = threading.Event(), threading.Event()

    def answer(rank: int, message: RpcMessage) -> RpcMessage:
        if rank == 1:
            asked.set()
            assert done.wait(PATIENCE_S)
        return RpcMessage({"for": rank})

    with Endpoints(3, answer=answer) as endpoints, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(endpoints[1].ask, {0: RpcMessage()})
        assert asked.wait(PATIENCE_S)
        assert endpoints[2].ask({0: RpcMessage()})[0].values == {"for": 2}
        done.set()
        assert slow.result(PATIENCE_S)[0].values == {"for": 1}


def test_who_cannot_answer_says_why_and_goes_on_answering() -> None:
    def answer(rank: int, message: RpcMessage) -> RpcMessage:
        if message.values["n"] == 1:
            raise KeyError("nothing of that name")
        return message

    with Endpoints(2, answer=answer) as (first, _):
        with pytest.raises(UnisonoError, match="rank 1 could not answer rank 0: KeyError: 'nothing of that name'"):
            first.ask({1: RpcMessage({"n": 1})})
        assert first.ask({1: RpcMessage({"n": 2})})[1].values == {"n": 2}


@HOSTS
def test_a_peer_that_hangs_up_wakes_everybody_who_waits_for_anybody(host: str) -> None:
    waiting = [threading.Event() for _ in range(3)]
    ended = [threading.Event() for _ in range(3)]

    def answer(rank: int, message: RpcMessage) -> RpcMessage:
        waiting[rank].set()
        assert ended[message.values["whom"]].wait(PATIENCE_S)
        raise WorkerLost("the workers part")

    with (
        Endpoints(3, host, answer, ends=lambda rank: ended[rank].set()) as endpoints,
        ThreadPoolExecutor(2) as pool,
    ):
        asks = [pool.submit(endpoints[0].ask, {1: RpcMessage({"whom": 1})})]  # neither asks the one that hangs up
        asks.append(pool.submit(endpoints[1].ask, {0: RpcMessage({"whom": 0})}))
        assert all(event.wait(PATIENCE_S) for event in waiting[:2])
        endpoints[2].close()
        for ask in asks:
            assert isinstance(ask.exception(PATIENCE_S), WorkerLost)


def test_to_abort_from_another_thread_wakes_the_one_who_waits() -> None:
    asked, ended = threading.Event(), threading.Event()

    def answer(rank: int, message: RpcMessage) -> RpcMessage:
        asked.set()
        assert ended.wait(PATIENCE_S)
        return message

    with Endpoints(2, answer=answer, ends=lambda rank: ended.set()) as (first, _), ThreadPoolExecutor(1) as pool:
        ask = pool.submit(first.ask, {1: RpcMessage()})
        assert asked.wait(PATIENCE_S)
        first.abort()
        with pytest.raises(WorkerLost, match="rank 0 lost its connection"):
            ask.result(PATIENCE_S)
        with pytest.raises(WorkerLost):
            first.ask({1: RpcMessage()})


def test_who_gives_no_answer_in_time_is_named() -> None:
    ended = threading.Event()

    def answer(rank: int, message: RpcMessage) -> RpcMessage:
        assert ended.wait(PATIENCE_S)
        return message

    with (
        Endpoints(2, answer=answer, timeout_s=0.1, ends=lambda rank: ended.set()) as (first, _),
        pytest.raises(NoProgress, match=r"rank 0 waited for rank 1 in vain.*timeout_s"),
    ):
        first.ask({1: RpcMessage()})


@HOSTS
@settings(max_examples=20)
@given(words=st.lists(st.binary(max_size=400), max_size=4))
def test_a_stranger_without_the_secret_is_turned_away_and_harms_nobody(host: str, words: list[bytes]) -> None:
    with Endpoints(2, host) as (first, second), called(second) as stranger:
        with suppress(ConnectionError):
            for word in words:
                stranger.sendall(word)
        assert first.ask({1: RpcMessage()})[1].values == {"to": 0}
        assert second.ask({0: RpcMessage()})[0].values == {"to": 1}
        with suppress(OSError):  # hung up on already
            stranger.shutdown(socket.SHUT_WR)
        assert len(hears(stranger)) in (0, 64)  # at most what every caller is asked, and no welcome


def test_a_stranger_that_knows_how_to_begin_and_not_the_secret_is_turned_away() -> None:
    with Endpoints(2) as (first, second), called(second) as stranger:
        with pytest.raises(Impostor, match="no worker of this generation"):
            present(stranger, 0, "ab" * 32)
        assert first.ask({1: RpcMessage()})[1].values == {"to": 0}


def hears(stranger: socket.socket) -> bytes:
    """What a stranger is told in the end: nothing."""
    try:
        return stranger.recv(4096)
    except ConnectionError:
        return b""


def test_a_stranger_that_says_nothing_does_not_keep_a_worker_from_closing() -> None:
    opened = Endpoints(2, "127.0.0.1")
    with opened as (first, second), called(second):
        assert first.ask({1: RpcMessage()})[1].values == {"to": 0}
        for endpoint in opened.endpoints:
            endpoint.close()


@HOSTS
@pytest.mark.parametrize("after", [0, 1], ids=["before anybody has called", "after all have called"])
def test_nothing_is_left_behind_where_forming_fails(host: str, after: int) -> None:
    table = Table(3)

    def formed(rank: int) -> BaseException | None:
        gather, times = table.gather(rank), [0]

        def lossy(value: Any) -> list[Any]:
            if rank == 2 and times[0] == after:
                table.leave()
                raise WorkerLost("rank 2 is gone")
            times[0] += 1
            return gather(value)

        try:
            with closing(RpcEndpoint(rank, host, echo, Traffic(), PATIENCE_S)) as endpoint:
                endpoint.meet(lossy)
        except WorkerLost as error:
            return error
        return None

    with ThreadPoolExecutor(3) as pool:
        assert all(isinstance(error, WorkerLost) for error in pool.map(formed, range(3)))


@HOSTS
def test_a_worker_that_is_gone_before_it_is_called_is_lost(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = list(gone.getsockname()) if host else f"\0unisono-{'0' * 32}"

    def gather(value: Any) -> list[Any]:
        return [value, [address, "secret"]]

    with (
        closing(RpcEndpoint(0, host, echo, Traffic(), PATIENCE_S)) as endpoint,
        pytest.raises(WorkerLost, match="rank 0 lost its connection"),
    ):
        endpoint.meet(gather)


SHOWN = "what callers show"


class Mute:
    """A worker that is stopped some time: its connections stay, and it neither hears nor says any more.

    Args:
        says: what it does before it is stopped, with the first connection.
    """

    def __init__(self, host: str, says: Callable[[socket.socket], None]) -> None:
        self._listening = listen(host)
        self._says, self._called = says, threading.Event()
        self._thread = threading.Thread(target=self._speak)
        self._thread.start()

    def gather(self, value: Any) -> list[Any]:
        return [value, json.loads(json.dumps([address_of(self._listening), SHOWN]))]

    def until_called(self) -> None:
        assert self._called.wait(PATIENCE_S)

    def close(self) -> None:
        self.until_called()
        self._thread.join(PATIENCE_S)
        self._connection.close()
        self._listening.close()

    def _speak(self) -> None:
        self._connection, _ = self._listening.accept()
        self._says(self._connection)
        self._called.set()


def nothing(connection: socket.socket) -> None:
    pass


def half_a_greeting(connection: socket.socket) -> None:
    connection.sendall(bytes(20))


def a_welcome(connection: socket.socket) -> None:
    greeting = greet(connection, SHOWN)
    wanted = next(greeting)
    with suppress(StopIteration):
        while True:
            wanted = greeting.send(receive(connection, wanted))


def half_an_answer(connection: socket.socket) -> None:
    a_welcome(connection)
    RpcConnection(connection).receive()
    connection.sendall(struct.pack("<IQ", 2, 1000) + b"{}")


LARGE = RpcMessage(packed=torch.zeros(4_000_000, dtype=torch.uint8))


@HOSTS
@pytest.mark.parametrize("says", [nothing, half_a_greeting, a_welcome, half_an_answer])
def test_a_worker_that_is_stopped_at_any_moment_is_waited_for_no_longer_than_said(
    host: str, says: Callable[[socket.socket], None]
) -> None:
    with (
        closing(Mute(host, says)) as mute,
        closing(RpcEndpoint(0, host, echo, Traffic(), timeout_s=0.3)) as endpoint,
        pytest.raises(NoProgress, match=r"rank 0 waited for rank 1 in vain.*timeout_s"),
    ):
        endpoint.meet(mute.gather)
        endpoint.ask({1: LARGE})


def test_to_abort_wakes_whoever_calls_a_worker_that_does_not_answer() -> None:
    with (
        closing(Mute("", half_a_greeting)) as mute,
        closing(RpcEndpoint(0, "", echo, Traffic(), PATIENCE_S)) as endpoint,
        ThreadPoolExecutor(1) as pool,
    ):
        calling = pool.submit(endpoint.meet, mute.gather)
        mute.until_called()
        endpoint.abort()
        assert type(calling.exception(PATIENCE_S)) is WorkerLost


def test_who_is_waited_for_is_named_by_the_one_that_knows() -> None:
    def answer(rank: int, message: RpcMessage) -> RpcMessage:
        raise NoProgress("rank 2 does not come back")

    with Endpoints(2, answer=answer) as (first, _):
        with pytest.raises(NoProgress, match="rank 2 does not come back"):
            first.ask({1: RpcMessage()})
        with pytest.raises(WorkerLost):
            first.ask({1: RpcMessage()})


def test_bytes_and_messages_are_counted_where_they_are_sent() -> None:
    opened = Endpoints(2)
    with opened as (first, _):
        before = [(one.sent_bytes, one.sent_messages) for one in opened.traffic]
        first.ask({1: RpcMessage({"a": 1}, torch.zeros(1000, dtype=torch.uint8))})
        first.ask({1: RpcMessage()})
    sent = [  # counted behind the sending, so complete when all is closed
        (one.sent_bytes - was[0], one.sent_messages - was[1]) for one, was in zip(opened.traffic, before, strict=True)
    ]
    sizes = 2 * struct.calcsize("<IQ")
    questions = sizes + len('{"a": 1}') + 1000 + len("{}")
    answers = sizes + len('{"a": 1, "to": 0}') + 1000 + len('{"to": 0}')
    assert sent == [(questions, 2), (answers, 2)]
