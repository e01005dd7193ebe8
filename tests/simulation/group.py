"""The members of a generation, and the collective calls that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.script import Life
    from simulation.training import Training
    from simulation.world import World
    from unisono.membership.messages import NewGeneration
    from unisono.membership.state.roster import MintedGeneration

Key = tuple[str, int]
"""Which collective call of a generation."""


@dataclass
class Call:
    """A collective call: whoever has taken part goes on once all whose part it needs have, too."""

    needs: frozenset[str]
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.needs <= self.parts.keys()


@dataclass
class Group:
    """What the members of a generation have between them: the transport."""

    world: World
    minted: MintedGeneration
    told: NewGeneration
    life: Life
    begins: bool  # a first generation: from the newest checkpoint
    calls: dict[Key, Call] = field(default_factory=dict)
    connected: set[str] = field(default_factory=set)
    broken: bool = False

    @property
    def base(self) -> int:
        """Acts that everybody has when this generation begins to work."""
        return self.minted.roster[self.minted.source].acts

    @property
    def names(self) -> frozenset[str]:
        return frozenset(seat.worker for seat in self.minted.roster)

    @property
    def hosts(self) -> list[str]:
        return sorted({self.world.workers[seat.worker].host.name for seat in self.minted.roster})

    @cached_property
    def connects(self) -> bool:
        """Whether its members can connect, as it was when all had met."""
        return self.world.network.connects(self.hosts)

    def rank(self, name: str) -> int:
        return next(rank for rank, seat in enumerate(self.minted.roster) if seat.worker == name)

    @property
    def source(self) -> str:
        return self.minted.roster[self.minted.source].worker

    @property
    def members(self) -> list[Training]:
        found = (self.world.workers[seat.worker].main for seat in self.minted.roster)
        return [worker for worker in found if worker.group is self]

    def take_part(self, worker: Training, key: Key, part: Any, source: str | None = None) -> Call:
        """A member makes a call: a broadcast, if it has a source, or one to which all give their part."""
        if key not in self.calls:
            self.calls[key] = Call(self.names if source is None else frozenset([source]))
        call = self.calls[key]
        was_complete = call.is_complete
        call.parts[worker.name] = part
        self.world.delicate()
        if self.broken:
            self.world.later(self.world.soon(), partial(worker.notice, self, abruptly=True))
        if not call.is_complete:
            return call
        for member in [worker] if was_complete else self.members:
            if member.name in call.parts:
                self.world.later(self.world.soon(), partial(member.returns, self, key, call))
        return call
