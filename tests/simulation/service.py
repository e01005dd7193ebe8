"""The coordinator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from simulation.group import Group
from simulation.process import Process
from simulation.settings import SHARDS
from unisono.membership import state as machine
from unisono.membership.messages import AgentHello, Message, Minted, Progress, WorkerHello

if TYPE_CHECKING:
    from simulation.link import Link
    from simulation.world import World

STATE: TypeAdapter[machine.State] = TypeAdapter(machine.State)


class Service:
    """What stands around the state machine: writes the state down, then acts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = machine.State(settings=world.settings)
        self.is_up = True
        self.crashes_within = False
        self._held_until = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._lives = 1
        self._links: dict[str, Link] = {}
        self._alarm = 0
        self._minted: dict[int, Minted] = {}
        self._written = self.state

    def receive(self, link: Link, message: Message) -> None:
        self._take(partial(self._receive, link, message))

    def disconnected(self, link: Link) -> None:
        self._take(partial(self._disconnected, link))

    def handle(self, event: machine.Event) -> None:
        self._take(partial(self._handle, event))

    def hold_up(self, seconds: float) -> None:
        if self.is_up:
            self._held_until = max(self._held_until, self.world.now + seconds)

    def _take(self, what: Callable[[], None]) -> None:
        """Everything waits, in order, while the coordinator is held up."""
        if self.world.now >= self._held_until and not self._waiting:
            what()
            return
        self._waiting.append(what)
        if len(self._waiting) == 1:
            self.world.at(self._held_until, partial(self._catch_up, self._lives))

    def _catch_up(self, life: int) -> None:
        if self._lives == life and self.world.now < self._held_until:
            self.world.at(self._held_until, partial(self._catch_up, life))
        while self._lives == life and self.world.now >= self._held_until and self._waiting:
            self._waiting.popleft()()

    def _receive(self, link: Link, message: Message) -> None:
        if not self.is_up:
            link.cut()
            return
        name = link.peer.name
        if isinstance(message, WorkerHello | AgentHello):
            if (older := self._links.get(name)) is not None and older is not link:
                older.cut()
            self._links[name] = link
        if self._links.get(name) is link:
            heard: Any = machine.Heard if isinstance(link.peer, Process) else machine.AgentHeard
            self._handle(heard(name, message))

    def _disconnected(self, link: Link) -> None:
        name = link.peer.name
        if self._links.get(name) is link:
            del self._links[name]
            which = "worker" if isinstance(link.peer, Process) else "agent"
            self._handle(machine.Disconnected(**{which: name}))

    def _handle(self, event: machine.Event) -> None:
        if not self.is_up:
            return
        crashes_at = self.world.chance.randint(-1, 4) if self.crashes_within else None
        before = self.state
        if crashes_at != -1:
            self.state, actions = machine.step(before, event, self.world.now)
            self._check(before)
            is_fleeting = isinstance(event, machine.Heard) and isinstance(event.message, Progress) and not actions
            self._written = self._written if is_fleeting else self.state
            for action in actions[:crashes_at]:
                self._act(action)
        if crashes_at is not None:
            self.crashes_within = False
            self.crash()
        self._set_alarm()

    def _act(self, action: machine.Action) -> None:
        match action:
            case machine.Tell(name, message) | machine.TellAgent(name, message):
                if isinstance(message, Minted):
                    self._record(message)
                if (link := self._links.get(name)) is not None:
                    link.answer(message)
            case machine.Hangup(name):
                if (link := self._links.get(name)) is not None:
                    link.hang_up()

    def crash(self) -> None:
        if not self.is_up:
            return
        self.is_up, self._held_until = False, 0.0
        self._waiting.clear()
        self._lives += 1
        links = [host.link for host in self.world.agents] + [worker.link for worker in self.world.workers.values()]
        for link in links:
            if link is not None:
                link.cut()
        self._links = {}
        away = self.world.chance.choice([0.1, 1.0, 5.0, 30.0])
        self.world.later(away, self.start_again)

    def start_again(self) -> None:
        written = STATE.dump_json(self._written)
        self.state = STATE.validate_json(written)
        assert self.state == self._written
        self.is_up = True
        self._handle(machine.Restarted())

    def _set_alarm(self) -> None:
        self._alarm += 1
        alarm, deadline = self._alarm, machine.next_deadline(self.state)
        if deadline is not None and self.is_up:
            self.world.at(max(deadline, self.world.now), partial(self._take, partial(self._ring, alarm)))

    def _ring(self, alarm: int) -> None:
        if alarm == self._alarm:
            self._handle(machine.Tick())

    def _record(self, minted: Minted) -> None:
        """One number is one roster, whoever is told of it and however often."""
        assert self._minted.setdefault(minted.generation, minted) == minted

    def _check_progress(self, before: machine.State, minted: Minted) -> None:
        """What has failed with all alive is not tried for ever."""
        last = self.world.groups.get(before.generation)
        failed = last is not None and last.formed != last.names and last.names == {one.worker for one in minted.roster}
        self.world.repeated = self.world.repeated + 1 if failed else 0
        assert self.world.repeated <= 2, "the same workers fail to form a generation again and again"

    def _check(self, before: machine.State) -> None:
        after = self.state
        assert after.generation >= before.generation
        for member in after.members:
            assert (member.phase == "arrived") == (member.arrived is not None)
        for agent in after.agents.values():
            mine = [worker for worker in after.workers.values() if worker.agent == agent.id]
            assert len(mine) <= max(agent.workers, len([w for w in before.workers.values() if w.agent == agent.id]))
        if after.generation > before.generation and after.minted is not None:
            minted = after.minted
            assert after.generation == before.generation + 1
            self._check_progress(before, minted)
            names = [seat.worker for seat in minted.roster]
            assert len(set(names)) == len(names) <= SHARDS
            assert minted.bounds[0] == 0
            assert minted.bounds[-1] == SHARDS
            assert len(minted.bounds) == len(names) + 1
            begins = before.minted is None
            base = self.world.checkpoint if begins else minted.roster[minted.source].acts
            newcomers = [seat for seat in minted.roster if seat.joins and before.workers[seat.worker].phase == "ready"]
            assert not newcomers or self.world.script[base] == (minted.loop, True), "joins where nobody can"
            if begins:
                self.world.committed, self.world.loops_over = base, set()
            self.world.groups[after.generation] = Group(self.world, minted, base, begins)
