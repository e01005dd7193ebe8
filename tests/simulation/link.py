"""A connection between a worker or an agent and the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from unisono.membership.messages import Message

if TYPE_CHECKING:
    from simulation.host import Host
    from simulation.process import Process
    from simulation.world import World


class Link:
    """A connection: messages arrive in order, or not at all."""

    def __init__(self, world: World, peer: Process | Host) -> None:
        self.world = world
        self.peer = peer
        self.whole = True
        self._busy_until = [0.0, 0.0]

    def send(self, message: Message) -> None:
        self._carry(0, lambda: self.world.service.receive(self, message))

    def answer(self, message: Message) -> None:
        self._carry(1, lambda: self.peer.receive(message))

    def hang_up(self) -> None:
        self._carry(1, self.cut)

    def cut(self) -> None:
        """Both ends notice some time. What is on the way is lost."""
        if self.whole:
            self.whole = False
            self.world.later(self.world.soon(), lambda: self.world.service.disconnected(self))
            self.world.later(self.world.soon(), lambda: self.peer.disconnected(self))

    def _carry(self, way: int, deliver: Callable[[], None]) -> None:
        arrival = max(self._busy_until[way], self.world.now + self.world.soon(0.1))
        self._busy_until[way] = arrival
        self.world.later(arrival - self.world.now, lambda: deliver() if self.whole else None)
