"""An agent, and the processes that it runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from simulation.link import Link
from simulation.process import Process
from simulation.settings import PROBING_S
from unisono.membership.coordinator import AgentSession
from unisono.membership.messages import (
    AgentHello,
    AgentLeaving,
    End,
    JobOver,
    Probe,
    Probed,
    Start,
    Unreached,
    WorkerEnded,
    to_agent,
)

if TYPE_CHECKING:
    from simulation.world import World


class Host:
    """An agent, and the processes that it runs."""

    def __init__(self, world: World, name: str, room: int) -> None:
        self.world = world
        self.name = name
        self.room = room
        self.alive = True
        self.leaving = False
        self.link: Link | None = None
        self.running: dict[str, Process | None] = {}
        self.untold: list[WorkerEnded] = []
        self.over = False
        self.probes = "" if world.chance.random() < 0.1 else f"{name}:1"
        self.connect()

    def connect(self) -> None:
        if not self.alive or self.over:
            return
        if not self.world.service.is_up:
            self.world.later(self.world.soon(1.0), self.connect)
            return
        self.link = Link(self.world, self, AgentSession)
        self.link.say(
            AgentHello(
                agent=self.name, host=self.name, workers=self.room, running=tuple(self.running), probes=self.probes
            )
        )
        if self.leaving:
            self.link.say(AgentLeaving())
        for ended in self.untold:
            self.tell(ended)
        self.untold = []

    def disconnected(self, link: Link) -> None:
        if link is self.link:
            self.link = None
            self.world.later(self.world.soon(1.0), self.connect)

    def leave(self) -> None:
        self.leaving = True
        if self.link is not None:
            self.link.say(AgentLeaving())

    def die(self) -> None:
        self.alive = False
        if self.link is not None:
            self.link.cut()
        for process in list(self.running.values()):
            if process is not None:
                process.die(-9)

    def receive(self, text: str) -> None:
        if not self.alive:
            return
        match to_agent.validate_json(text):
            case Start(workers=names, delay_s=delay_s):
                for name in names:
                    assert name not in self.world.workers
                    self.running[name] = None
                    self.world.later(delay_s, partial(self.start, name))
            case Probe(targets=targets):
                for target in targets:
                    self.probe(target.agent)
            case End(workers=names, how=how):
                for name in names:
                    self.end(name, how)
            case JobOver():
                self.over = True
                for name in list(self.running):
                    self.end(name, "kill")

    def probe(self, other: str) -> None:
        """Find out, and say so if the connection is still there."""
        network = self.world.network
        if network.reaches(self.name, other) and network.reaches(other, self.name):
            found = Probed(reached=(other,))
        else:
            found = Probed(unreached=(Unreached(agent=other, why="timed out"),))
        link = self.link
        patience = self.world.soon() if found.reached else PROBING_S
        self.world.later(patience, lambda: link.say(found) if link is not None and link is self.link else None)

    def start(self, name: str) -> None:
        if self.alive and name in self.running:
            self.world.workers[name] = self.running[name] = Process(self.world, name, self)

    def end(self, name: str, how: str) -> None:
        process = self.running.get(name)
        if process is not None and process.alive:
            self.world.later(self.world.soon(), lambda: process.die(-9) if how == "kill" else process.ask_to_leave())
        elif name in self.running and process is None:
            self.ended(WorkerEnded(worker=name, code=-9))

    def reap(self, process: Process, code: int, error: str) -> None:
        if self.alive and process.name in self.running:
            self.ended(WorkerEnded(worker=process.name, code=code, error=error))

    def ended(self, ended: WorkerEnded) -> None:
        if self.link is None:
            self.untold.append(ended)
        else:
            self.tell(ended)

    def tell(self, ended: WorkerEnded) -> None:
        assert self.link is not None
        self.running.pop(ended.worker, None)
        self.link.say(ended)
