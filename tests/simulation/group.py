"""The members of a generation, and what they have between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from simulation.settings import FORMING_S, PROBING_S
from unisono.membership.messages import Minted

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.world import World


@dataclass
class Group:
    """What the members of a generation have between them: the transport."""

    world: World
    minted: Minted
    base: int  # acts that everybody has when this generation begins to work: nobody goes on from anything older
    begins: bool  # a first generation: from the newest checkpoint
    entered: set[str] = field(default_factory=set)
    formed: set[str] = field(default_factory=set)
    given: dict[int, dict[str, bool]] = field(default_factory=dict)  # by act: who gave his part, and wants to stop
    broken: bool = False

    @property
    def names(self) -> set[str]:
        return {seat.worker for seat in self.minted.roster}

    @property
    def hosts(self) -> list[str]:
        return sorted({self.world.workers[seat.worker].host.name for seat in self.minted.roster})

    @property
    def members(self) -> list[Process]:
        found = (self.world.workers[seat.worker] for seat in self.minted.roster)
        return [worker for worker in found if worker.group is self]

    def enter(self, worker: Process) -> None:
        self.entered.add(worker.name)
        self.world.delicate()
        if self.broken:
            self.world.later(self.world.soon(), partial(worker.notice, self, abruptly=True))
        elif self.entered == self.names:
            connects = self.world.network.connects(self.hosts)
            for member in self.members:
                if connects:
                    self.world.later(self.world.soon(), partial(member.formed, self))
                else:  # some time it gives up, and cannot say because of whom
                    self.world.later(FORMING_S + self.world.soon(), partial(member.did_not_form, self, ()))
        unreached = tuple(host for host in self.hosts if not self.world.network.reaches(worker.host.name, host))
        if unreached:
            self.world.later(PROBING_S + self.world.soon(), partial(worker.did_not_form, self, unreached))

    def give(self, worker: Process, stops: bool) -> None:
        given = self.given.setdefault(worker.acts, {})
        given[worker.name] = stops
        if set(given) == self.names:
            act = worker.acts
            self.world.delicate()
            for member in self.members:
                self.world.later(self.world.soon(), partial(member.commit, self, act))

    def is_complete(self, act: int) -> bool:
        return set(self.given.get(act, {})) == self.names
