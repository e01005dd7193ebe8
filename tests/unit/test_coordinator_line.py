"""An agent's connection to the coordinator: what it makes of words that are none."""

import asyncio
from collections.abc import Sequence

import pytest
from websockets.asyncio.server import ServerConnection, serve

from unisono.errors import LaunchError
from unisono.launch.elastic.address import Address
from unisono.launch.elastic.coordinator_process import CoordinatorLine
from unisono.membership.messages import FromAgent

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("said", ["{", "[]", '{"kind": "minted"}', '{"kind": "start", "workers": [7]}', b"\x00"])
def test_what_an_agent_does_not_know_is_said_in_a_line(said: str | bytes) -> None:
    with pytest.raises(LaunchError, match="sends a message that this version does not know"):
        asyncio.run(_hears(said))


async def _hears(said: str | bytes) -> None:
    async def says(connection: ServerConnection) -> None:
        await connection.send(said)
        await connection.wait_closed()

    async def greeting(address: str) -> Sequence[FromAgent]:
        return []

    async with serve(says, "127.0.0.1", 0) as server, asyncio.timeout(60):
        port = next(iter(server.sockets)).getsockname()[1]
        line = CoordinatorLine(Address(f"http://127.0.0.1:{port}", "x" * 43), greeting, lambda message: None, 30.0)
        await line.keep()
