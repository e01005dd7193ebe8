"""Everything there is, and the order in which it happens."""

import random
from pathlib import Path

from simulation import faults
from simulation.checks import check_kept
from simulation.group import Group
from simulation.host import Host
from simulation.network import Network
from simulation.process import Process
from simulation.script import Life, Script
from simulation.service import Service
from simulation.settings import FAULTS_END_S, OVER_BY_S, TIMEOUT_S
from unisono.membership import state as machine
from unisono.membership.messages import JobOver, NewGeneration
from unisono.membership.state.roster import MintedGeneration
from unisono_lab.simulation.coordination import Course


class World(Course):
    """Everything there is, and the order in which it happens."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        steps = (self.chance.randint(1, 8), self.chance.randint(1, 8))
        self.script = Script(tuple(self.chance.randint(0, 2) for _ in range(3)), steps)
        self.checkpoint = 0  # steps that it holds
        self.lives: list[Life] = []
        self.repeated = 0  # how often in a row the same workers were to form a generation, and did not
        self.groups: dict[int, Group] = {}
        self.minted: dict[int, MintedGeneration] = {}
        self.agents: list[Host] = []
        self.workers: dict[str, Process] = {}
        smallest = self.chance.randint(1, 3)
        largest = self.chance.randint(max(2, smallest), 5)
        self.errors = self.chance.random() < 0.1  # scripts may fail of themselves
        self.settings = machine.ElasticConfig(
            smallest, largest, max_restarts=1000, restart_on_error=False, failure_timeout_s=TIMEOUT_S
        )
        self.malice = self.chance.choice([0.02, 0.1, 0.3])
        self.faults_left = self.chance.choice([2, 5, 10])
        self.network = Network()
        self.folder = folder
        self.service = Service(self, folder)

    def soon(self, most: float = 0.3) -> float:
        return self.chance.uniform(0.001, most)

    def play(self) -> JobOver:
        self.add_host()
        for _ in range(self.chance.randint(0, 3)):
            self.later(self.soon(8.0), self.add_host)
        for _ in range(self.chance.randint(0, 4)):
            self.later(self.chance.uniform(0.0, FAULTS_END_S / 2), self.go_wrong)
        self.later(FAULTS_END_S + 1, self.mend)
        while self.now <= OVER_BY_S and self.go_on():
            pass
        over = self.service.state.over
        assert over is not None, f"not over: {machine.status(self.service.state)}"
        assert not any(worker.alive for worker in self.workers.values()), "a worker was left behind"
        check_kept(self)
        return over

    @property
    def life(self) -> Life:
        """The newest."""
        return self.lives[-1]

    def group_of(self, told: NewGeneration) -> Group:
        """The members of a generation. One number is one roster, whoever is told of it and however often."""
        minted = self.minted[told.generation]
        assert told.acts == [seat.acts for seat in minted.roster]
        assert told.joiners == {rank for rank, seat in enumerate(minted.roster) if seat.joins}
        assert (told.bounds, told.source, told.loop) == (minted.bounds, minted.source, minted.loop)
        assert all(minted.roster[one.rank].worker == one.worker for one in told.here)
        if minted.generation not in self.groups:
            begins = minted.loop is None
            if begins:
                self.lives.append(Life(len(self.lives), self.script.acts(self.checkpoint), self.checkpoint))
            self.groups[minted.generation] = Group(self, minted, told, self.life, begins)
        return self.groups[minted.generation]

    # -- faults

    def is_wicked(self) -> bool:
        return self.now < FAULTS_END_S and self.faults_left > 0 and self.chance.random() < self.malice

    def delicate(self) -> None:
        """A moment at which what goes wrong hurts most."""
        if self.is_wicked():
            self.later(self.soon(0.2), self.go_wrong)

    def go_wrong(self) -> None:
        self.faults_left = max(0, self.faults_left - 1)
        self.chance.choice(faults.FAULTS)(self)

    def add_host(self) -> None:
        self.agents.append(Host(self, f"a{len(self.agents)}", self.chance.randint(1, 4)))

    def rooms(self) -> dict[str, int]:
        return {host.name: host.room for host in self.agents if host.alive and not host.leaving}

    def heal(self) -> None:
        self.network.heal(self.chance)

    def mend(self) -> None:
        """From now on nothing goes wrong, and there is room. Some hosts may never reach each other again."""
        self.errors = False
        self.network.secret.clear()
        while sum(self.rooms().values()) < self.settings.smallest:
            self.add_host()
        while self.network.largest(self.rooms()) < self.settings.smallest:
            self.heal()
        for worker in self.workers.values():
            worker.main.slowness = min(worker.main.slowness, 3.0)
