"""A connection between a worker or an agent and the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from unisono.membership.coordinator import Session
from unisono.membership.messages import Message

if TYPE_CHECKING:
    from simulation.world import World


class End(Protocol):
    """Who has opened a connection."""

    def receive(self, text: str) -> None:
        """A message has come."""

    def disconnected(self, link: Link) -> None:
        """The connection is gone."""


class Link:
    """A connection: messages arrive in order, or not at all. To the coordinator it is a peer.

    Args:
        world: that it is in.
        end: that has opened it.
        kind: of the coordinator's session.
    """

    def __init__(self, world: World, end: End, kind: type[Session]) -> None:
        self.world = world
        self.kind = kind
        self.session: Session | None = None
        self._end = end
        self._whole = True
        self._busy_until = [0.0, 0.0]
        world.service.links.append(self)

    @property
    def is_whole(self) -> bool:
        return self._whole

    def say(self, message: Message) -> None:
        """To the coordinator."""
        text = message.model_dump_json()
        self._carry(0, lambda: self.world.service.receive(self, text))

    def send(self, text: str) -> None:
        """From the coordinator."""
        self.world.service.burn()
        self._carry(1, lambda: self._end.receive(text))

    def hang_up(self) -> None:
        self.world.service.burn()
        self._carry(1, self.cut)

    def end(self) -> None:
        """The process that has opened it ends, after what it has said."""
        self._carry(0, self.cut)

    def cut(self) -> None:
        """Both ends notice some time. What is on the way is lost."""
        if self._whole:
            self._whole = False
            self.world.later(self.world.soon(), lambda: self.world.service.disconnected(self))
            self.world.later(self.world.soon(), lambda: self._end.disconnected(self))

    def _carry(self, way: int, deliver: Callable[[], None]) -> None:
        arrival = max(self._busy_until[way], self.world.now + self.world.soon(0.1))
        self._busy_until[way] = arrival
        self.world.later(arrival - self.world.now, lambda: deliver() if self._whole else None)
