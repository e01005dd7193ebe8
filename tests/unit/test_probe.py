"""Whether two hosts reach each other, found out by a short connection in each direction."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from unisono.membership import probe as probing
from unisono.membership.messages import Target
from unisono.membership.probe import MOST_CALLERS, Answering, probe, unreached

pytestmark = pytest.mark.unit

TOKEN = "t" * 43
HERE = "127.0.0.1"
PATIENCE_S = 20.0
SHORT_S = 0.3


@asynccontextmanager
async def host(name: str, token: str = TOKEN) -> AsyncIterator[Target]:
    answering = Answering(name, token)
    await answering.listen(HERE)
    try:
        yield Target(agent=name, host=f"host-{name}", address=answering.address)
    finally:
        await answering.close()


@asynccontextmanager
async def stranger(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Target]:
    """Something else that listens where an agent is expected."""
    server = await asyncio.start_server(serve, HERE, 0)
    try:
        yield Target(agent="a", host="host-a", address=f"{HERE}:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()
        await server.wait_closed()


def nowhere(agent: str = "a") -> Target:
    return Target(agent=agent, host=f"host-{agent}", address=f"{HERE}:1")


def test_hosts_that_reach_each_other_say_so() -> None:
    async def main() -> dict[str, str]:
        async with host("a") as a, host("b") as b, host("c") as c:
            return await probe([a, b], TOKEN, PATIENCE_S, back=c)

    assert asyncio.run(main()) == {"a": "", "b": ""}


def test_a_host_that_refuses_is_named_with_the_reason_and_the_others_are_reached_all_the_same() -> None:
    async def main() -> dict[str, str]:
        async with host("a") as a:
            return await probe([a, nowhere("b")], TOKEN, SHORT_S)

    found = asyncio.run(main())
    assert found["a"] == ""
    assert "refused" in found["b"]
    assert [one.agent for one in unreached(found)] == ["b"]


def test_a_host_that_cannot_connect_back_is_not_reached() -> None:
    async def main() -> dict[str, str]:
        async with host("a") as a:
            return await probe([a], TOKEN, SHORT_S, back=nowhere("c"))

    (why,) = asyncio.run(main()).values()
    assert why.startswith(f"it does not connect back to {HERE}:1: ")


def test_a_host_that_says_nothing_is_given_up_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> dict[str, str]:
        async with stranger(silent) as a:
            return await probe([a], TOKEN, SHORT_S)

    assert asyncio.run(main()) == {"a": "nobody answers"}


@pytest.mark.parametrize(
    "said",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"\n", b"x" * 100_000, b'{"nonce": 1}\n', b"[" * 5000 + b"\n", b"\xff\n"],
    ids=["another service", "nothing", "no end", "wrong type", "too deep", "no text"],
)
def test_whatever_else_answers_there_is_no_host_of_the_job(said: bytes) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async def main() -> dict[str, str]:
        async with stranger(other) as a:
            return await probe([a], TOKEN, SHORT_S)

    (why,) = asyncio.run(main()).values()
    assert why


def test_an_agent_of_another_job_is_not_the_one_that_was_meant() -> None:
    async def main() -> dict[str, str]:
        async with host("a", token="x" * 43) as a:
            return await probe([a], TOKEN, SHORT_S)

    assert asyncio.run(main())["a"]


def test_another_agent_of_the_same_job_is_not_the_one_that_was_meant() -> None:
    async def main() -> dict[str, str]:
        async with host("a") as a:
            return await probe([a.model_copy(update={"agent": "b"})], TOKEN, SHORT_S)

    assert asyncio.run(main())["b"]


def test_nobody_connects_back_for_a_caller_without_the_token() -> None:
    called = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal called
        called += 1
        writer.close()

    async def main() -> dict[str, str]:
        async with host("a") as a, stranger(count) as back:
            return await probe([a], "x" * 43, SHORT_S, back=back)

    assert asyncio.run(main())["a"]
    assert called == 0


def test_an_answer_that_somebody_else_has_heard_before_proves_nothing() -> None:
    async def main() -> str:
        async with host("a") as a:
            reader, writer = await asyncio.open_connection(HERE, int(a.address.rpartition(":")[2]))
            challenge = probing.Challenge.model_validate_json(await reader.readline())
            call = probing.ProbeRequest(nonce="0" * 64, wanted="a", back=None, proof="0" * 64)
            old = probing._proof(TOKEN, "call", probing.Challenge(nonce="1" * 64), call)
            assert challenge.nonce != "1" * 64
            writer.write(call.model_copy(update={"proof": old}).model_dump_json().encode() + b"\n")
            said = await reader.read()
            writer.close()
            return said.decode()

    assert asyncio.run(main()) == ""


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_a_thousand_silent_or_rude_callers_keep_nobody_out_and_leave_nothing_behind() -> None:
    async def main() -> None:
        async with host("a") as a:
            port = int(a.address.rpartition(":")[2])
            before = descriptors()
            writers = []
            for number in range(1000):
                _, writer = await asyncio.open_connection(HERE, port)
                writer.write(b"" if number % 3 else b"x" * 20_000 if number % 2 else json.dumps({"nonce": 1}).encode())
                writers.append(writer)
                if number % 100 == 99:  # both ends of the newest are open here, and of the others only theirs
                    assert descriptors() - before <= number + 1 + MOST_CALLERS + 5
                    assert await probe([a], TOKEN, PATIENCE_S) == {"a": ""}
            for writer in writers:
                writer.transport.abort()

    before = descriptors()
    asyncio.run(main())
    assert descriptors() <= before


def test_a_listener_stays_where_it_is_until_its_host_has_another_address() -> None:
    async def main() -> None:
        answering = Answering("a", TOKEN)
        assert answering.address == ""
        await answering.listen(HERE)
        first = answering.address
        await answering.listen(HERE)
        assert answering.address == first
        await answering.listen("127.0.0.2")
        assert answering.address.startswith("127.0.0.2:")
        await answering.listen("192.0.2.1")  # not one of ours
        assert answering.address == ""
        await answering.close()

    asyncio.run(main())
