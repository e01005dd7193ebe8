"""An agent's connection to the coordinator. It comes back by itself, as the coordinator does."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic
from urllib.parse import urlsplit

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from unisono.errors import LaunchError
from unisono.launch.elastic.address import Address, distrusted
from unisono.membership.agent_messages import FromAgent, Probed, ToAgent, to_agent
from unisono.membership.connection import Reconnection, ShutOut, call
from unisono.membership.data_address import data_address
from unisono.membership.messages import Refused, Target
from unisono.membership.probe import PATIENCE_S, Answering, probe, unreached
from unisono.membership.token import OUTDATED

# What an agent does so that the coordinator knows which hosts reach each other.


class Probes:
    """Answers other hosts' probes, and probes them when the coordinator asks for it.

    Args:
        agent: the id of this host's agent.
        host: the name of this host.
        coordinator: the coordinator's address.
        timeout_s: seconds after which a host counts as lost.
        tell: a function that sends a message to the coordinator.
    """

    def __init__(
        self, agent: str, host: str, coordinator: Address, timeout_s: float, tell: Callable[[FromAgent], None]
    ) -> None:
        self._agent, self._host, self._tell = agent, host, tell
        self._coordinator = urlsplit(coordinator.url).hostname or ""
        self._token, self._patience_s = coordinator.token, min(PATIENCE_S, timeout_s)
        self._answering = Answering(agent, self._token)
        self._asked: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where probes are answered; empty if they are not."""
        return self._answering.address

    async def listen(self, local_address: str) -> None:
        """Answer probes, where workers listen for those of other hosts.

        Args:
            local_address: this host's address, as the coordinator sees it.
        """
        await self._answering.listen(data_address(self._coordinator, local_address))

    def probe(self, targets: Sequence[Target]) -> None:
        """Probe hosts, and tell what came of it."""
        task = asyncio.create_task(self._probe(targets))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def close(self) -> None:
        """Neither answer nor probe any more."""
        tasks = list(self._asked)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._answering.close()

    async def _probe(self, targets: Sequence[Target]) -> None:
        back = Target(agent=self._agent, host=self._host, address=self.address)
        found = await probe(targets, self._token, self._patience_s, back)
        reached = tuple(agent for agent, why in found.items() if not why)
        self._tell(Probed(reached=reached, unreached=unreached(found)))


OPEN_S = 10.0
CLOSE_S = 1.0
PING_S = 20.0
LARGEST = 2**20
"""Bytes of a message from the coordinator: ids of a few thousand workers."""


class CoordinatorLine:
    """The agent's connection to the coordinator, opened again whenever it breaks.

    Args:
        address: the coordinator's address.
        greeting: a function that returns the first messages of each connection, given an address of this host: a hello,
            and what the coordinator may not have heard.
        hear: a function that gets each message except a refusal.
        patience_s: the seconds for which the coordinator may be gone.
    """

    def __init__(
        self,
        address: Address,
        greeting: Callable[[str], Awaitable[Sequence[FromAgent]]],
        hear: Callable[[ToAgent], None],
        patience_s: float,
    ) -> None:
        self._address, self._greeting, self._hear, self._patience_s = address, greeting, hear, patience_s
        self._outgoing: asyncio.Queue[FromAgent] | None = None
        self._there_at = monotonic()
        self._reconnection = Reconnection(self._dial, self._converse, self._pause)

    def say(self, message: FromAgent) -> None:
        """Send a message. While there is no connection it is left to the next greeting."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def keep(self) -> None:
        """Connect, and connect again, until cancelled.

        Raises:
            JobError: somebody else answers in the coordinator's place.
            LaunchError: the coordinator does not want this agent, or is gone for ``patience_s`` seconds.
        """
        self._there_at = monotonic()
        try:
            await self._reconnection.keep()
        except ShutOut as error:
            why = OUTDATED if error.is_outdated else error.__cause__
            raise LaunchError(f"the coordinator at {self._address.url} lets nobody in: {why}") from error

    @asynccontextmanager
    async def _dial(self) -> AsyncIterator[ClientConnection]:
        calling = call(
            self._address.url,
            "/agent",
            self._address.token,
            self._address.context,
            open_s=OPEN_S,
            ping_s=min(PING_S, self._patience_s / 4),  # a host that has vanished says nothing
            close_s=CLOSE_S,
            most=LARGEST,
        )
        try:
            async with calling as connection:
                self._reconnection.went_well()
                yield connection
        except ssl.SSLCertVerificationError as error:
            raise distrusted(self._address, error) from error

    async def _pause(self, seconds: float) -> None:
        if monotonic() - self._there_at > self._patience_s:
            raise LaunchError(f"no coordinator answered at {self._address.url} for {self._patience_s:g} s")
        await asyncio.sleep(seconds)

    async def _converse(self, connection: ClientConnection) -> None:
        """Talk until the connection ends, however it does."""
        self._outgoing = asyncio.Queue()
        for greeting in await self._greeting(connection.local_address[0]):
            self._outgoing.put_nowait(greeting)
        sending = asyncio.create_task(self._send(connection, self._outgoing))
        try:
            async for text in connection:
                message = _understood(text)
                if isinstance(message, Refused):
                    raise LaunchError(f"the coordinator refuses this agent: {message.reason}")
                self._hear(message)
        finally:
            self._outgoing, self._there_at = None, monotonic()
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending

    async def _send(self, connection: ClientConnection, outgoing: asyncio.Queue[FromAgent]) -> None:
        with suppress(WebSocketException):  # whoever reads sees the end, too
            while True:
                await connection.send((await outgoing.get()).model_dump_json())


def _understood(text: str | bytes) -> ToAgent:
    try:
        return to_agent.validate_json(text)
    except ValidationError as error:
        raise LaunchError(f"the coordinator says what this version does not know: {error}"[:4096]) from error
