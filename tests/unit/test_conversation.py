"""What a worker says on one connection after the other."""

import asyncio
import random

import pytest
from websockets.asyncio.server import ServerConnection, serve

from unisono.membership.client import MOST_UNSENT, Conversation, call
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


def said(conversation: Conversation) -> list[FromWorker]:
    """All that goes out now."""
    found = []
    while (message := conversation.next) is not None:
        conversation.sent(message)
        found.append(message)
    return found


def connected() -> Conversation:
    conversation = Conversation(HELLO)
    conversation.begin()
    assert said(conversation) == [HELLO]
    return conversation


def again(conversation: Conversation) -> list[FromWorker]:
    """What is said first on a new connection."""
    conversation.break_off()
    conversation.begin()
    return said(conversation)


def test_what_still_matters_is_said_again_on_a_new_connection() -> None:
    conversation = connected()
    for message in (ARRIVED, Leaving(), Progress(acts=1, step=1), Formed(generation=1)):
        conversation.say(message)
    said(conversation)
    assert again(conversation) == [HELLO, ARRIVED, Leaving()]


def test_the_newest_of_each_kind_is_said_again() -> None:
    conversation = connected()
    conversation.say(Ready(loop=0))
    conversation.say(Ready(loop=1))
    assert again(conversation) == [HELLO, Ready(loop=1)]


def test_what_belonged_to_an_earlier_generation_is_not_said_again() -> None:
    conversation = connected()
    for message in (Ready(), ARRIVED, Leaving()):
        conversation.say(message)
    conversation.enter(2)
    assert again(conversation) == [HELLO.model_copy(update={"generation": 2}), Leaving()]
    assert conversation.generation == 2


def test_a_question_is_asked_again_until_it_is_answered() -> None:
    conversation = connected()
    question = StoreRequest(id=0, operation="get", keys=("run/a",))
    number, answer = conversation.ask(question)
    asked = question.model_copy(update={"id": number})
    assert said(conversation) == [asked]
    assert again(conversation) == [HELLO, asked]
    assert conversation.heard(StoreReply(id=number, value="YQ==")) is answer
    assert again(conversation) == [HELLO]
    assert conversation.heard(StoreReply(id=number)) is None


def test_a_question_that_nobody_waits_for_is_not_asked_again() -> None:
    conversation = connected()
    number, _ = conversation.ask(StoreRequest(id=0, operation="get", keys=("run/a",)))
    assert conversation.give_up(number)
    assert not conversation.give_up(number)
    assert again(conversation) == [HELLO]


def test_without_a_connection_signs_of_life_are_left_out_and_few_messages_are_kept() -> None:
    conversation = Conversation(HELLO)
    conversation.say(Progress(acts=1, step=1))
    for number in range(2 * MOST_UNSENT):
        conversation.say(Formed(generation=number))
    conversation.begin()
    first, *others = said(conversation)
    assert first == HELLO
    assert others == [Formed(generation=number) for number in range(MOST_UNSENT, 2 * MOST_UNSENT)]


def test_nothing_is_said_after_the_job_is_over() -> None:
    conversation = connected()
    _, answer = conversation.ask(StoreRequest(id=0, operation="get", keys=("run/a",)))
    said(conversation)
    conversation.heard(JobOver(digest="00"))
    assert conversation.is_over
    conversation.say(Leaving())
    assert said(conversation) == []
    assert conversation.end() == [answer]


@pytest.mark.parametrize(("ping_s", "opens_within_s"), [(20.0, 20.0), (1.0, 5.0)])
def test_a_coordinator_that_many_call_at_once_may_take_as_long_to_open_as_to_answer(
    ping_s: float, opens_within_s: float
) -> None:
    calling = call("http://127.0.0.1:1", "/worker", "", None, open_s=5.0, ping_s=ping_s, close_s=1.0, most=1)
    assert calling.open_timeout == opens_within_s


def test_a_connection_draws_no_number_that_the_script_would_have_drawn() -> None:
    async def listen(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async def ping() -> None:
        async with serve(listen, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with call(url, "/", "token", None, open_s=5, ping_s=0.001, close_s=5, most=100) as connection:
                while not connection.latency:  # as long as no ping was answered
                    await asyncio.sleep(0)

    before = random.getstate()
    asyncio.run(asyncio.wait_for(ping(), 10))
    assert random.getstate() == before
