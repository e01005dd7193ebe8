"""What a worker says on one connection after the other."""

import asyncio
import random

import pytest
from websockets.asyncio.server import ServerConnection, serve

from unisono.membership.client import MOST_UNSENT, Outbox, open_connection
from unisono.membership.messages import (
    Arrived,
    Formed,
    FromWorker,
    JobOver,
    Leaving,
    Progress,
    Ready,
    StoreReply,
    StoreRequest,
    WorkerHello,
)

pytestmark = pytest.mark.unit

HELLO = WorkerHello(worker="w1", host="here", pid=1, shards=4)
ARRIVED = Arrived(generation=1, acts=5, loop=0, at_boundary=True, step=5)


def said(outbox: Outbox) -> list[FromWorker]:
    """All that goes out now."""
    found = []
    while (message := outbox.next) is not None:
        outbox.sent(message)
        found.append(message)
    return found


def connected() -> Outbox:
    outbox = Outbox(HELLO)
    outbox.connected()
    assert said(outbox) == [HELLO]
    return outbox


def again(outbox: Outbox) -> list[FromWorker]:
    """What is said first on a new connection."""
    outbox.disconnected()
    outbox.connected()
    return said(outbox)


def test_what_still_matters_is_said_again_on_a_new_connection() -> None:
    outbox = connected()
    for message in (ARRIVED, Leaving(), Progress(acts=1, step=1), Formed(generation=1)):
        outbox.put(message)
    said(outbox)
    assert again(outbox) == [HELLO, ARRIVED, Leaving()]


def test_the_newest_of_each_kind_is_said_again() -> None:
    outbox = connected()
    outbox.put(Ready(loop=0))
    outbox.put(Ready(loop=1))
    assert again(outbox) == [HELLO, Ready(loop=1)]


def test_what_belonged_to_an_earlier_generation_is_not_said_again() -> None:
    outbox = connected()
    for message in (Ready(), ARRIVED, Leaving()):
        outbox.put(message)
    outbox.enter(2)
    assert again(outbox) == [HELLO.model_copy(update={"generation": 2}), Leaving()]
    assert outbox.generation == 2


def test_a_question_is_asked_again_until_it_is_answered() -> None:
    outbox = connected()
    question = StoreRequest(id=0, operation="get", keys=("run/a",))
    number, answer = outbox.put_request(question)
    asked = question.model_copy(update={"id": number})
    assert said(outbox) == [asked]
    assert again(outbox) == [HELLO, asked]
    assert outbox.receive(StoreReply(id=number, value="YQ==")) is answer
    assert again(outbox) == [HELLO]
    assert outbox.receive(StoreReply(id=number)) is None


def test_a_question_that_nobody_waits_for_is_not_asked_again() -> None:
    outbox = connected()
    number, _ = outbox.put_request(StoreRequest(id=0, operation="get", keys=("run/a",)))
    assert outbox.cancel(number)
    assert not outbox.cancel(number)
    assert again(outbox) == [HELLO]


def test_without_a_connection_signs_of_life_are_left_out_and_few_messages_are_kept() -> None:
    outbox = Outbox(HELLO)
    outbox.put(Progress(acts=1, step=1))
    for number in range(2 * MOST_UNSENT):
        outbox.put(Formed(generation=number))
    outbox.connected()
    first, *others = said(outbox)
    assert first == HELLO
    assert others == [Formed(generation=number) for number in range(MOST_UNSENT, 2 * MOST_UNSENT)]


def test_nothing_is_said_after_the_job_is_over() -> None:
    outbox = connected()
    _, answer = outbox.put_request(StoreRequest(id=0, operation="get", keys=("run/a",)))
    said(outbox)
    outbox.receive(JobOver(digest="00"))
    assert outbox.is_over
    outbox.put(Leaving())
    assert said(outbox) == []
    assert outbox.close() == [answer]


@pytest.mark.parametrize(("ping_s", "opens_within_s"), [(20.0, 20.0), (1.0, 5.0)])
def test_a_coordinator_that_many_call_at_once_may_take_as_long_to_open_as_to_answer(
    ping_s: float, opens_within_s: float
) -> None:
    calling = open_connection(
        "http://127.0.0.1:1", "/worker", "", None, open_s=5.0, ping_s=ping_s, close_s=1.0, max_bytes=1
    )
    assert calling.open_timeout == opens_within_s


def test_a_connection_draws_no_number_that_the_script_would_have_drawn() -> None:
    async def listen(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async def ping() -> None:
        async with serve(listen, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with open_connection(
                url, "/", "token", None, open_s=5, ping_s=0.001, close_s=5, max_bytes=100
            ) as connection:
                while not connection.latency:  # as long as no ping was answered
                    await asyncio.sleep(0)

    before = random.getstate()
    asyncio.run(asyncio.wait_for(ping(), 10))
    assert random.getstate() == before
