"""What an agent does so that the coordinator knows which hosts reach each other."""

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from unisono.launch.elastic.address import Address
from unisono.membership.data_address import data_address
from unisono.membership.messages import FromAgent, Probed, Target
from unisono.membership.probe import PATIENCE_S, Answering, probe, unreached


class Probes:
    """Answers other hosts' probes, and probes them when the coordinator asks for it.

    Args:
        agent: that this is.
        host: its name.
        coordinator: of the job.
        timeout_s: after which a host counts as lost.
        tell: tells the coordinator.
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
            local_address: of this host, as the coordinator sees it.
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
