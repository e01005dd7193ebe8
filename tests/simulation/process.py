"""A worker's process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from simulation.link import Link
from simulation.settings import SHARDS
from unisono.membership.messages import (
    Arrived,
    Finished,
    Formed,
    JobOver,
    Leaving,
    Lost,
    Message,
    Minted,
    Progress,
    Pulse,
    Ready,
    Refused,
    RegroupDue,
    Removed,
    Unreached,
    Welcome,
    WorkerHello,
)

if TYPE_CHECKING:
    from simulation.group import Group
    from simulation.host import Host
    from simulation.world import World


class Process:
    """A worker's process."""

    def __init__(self, world: World, name: str, host: Host) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.alive = True
        self.hung = False
        self.stuck_since: float | None = None  # its main thread comes no further, and its connection is in order
        self.slowness = 1.0
        self.link: Link | None = None
        self.phase = "starting"  # preparing, waiting (to be taken in), arrived, training, finished
        self.generation = 0
        self.group: Group | None = None
        self.acts = 0
        self.has_state = False
        self.due = self.stops = False
        self.could_not_reach: tuple[str, ...] = ()
        self.leaving = False
        self.pending: Message | None = None  # what is said again on a new connection
        self.loop: int | None = None
        self.commits: list[int] = []
        self.tells_loop = world.chance.random() < 0.5
        world.later(world.soon(2.0), self.connect)

    @property
    def is_still(self) -> bool:
        return self.hung or self.stuck_since is not None

    # -- its connection

    def connect(self) -> None:
        if not self.alive or self.hung or (self.link is not None and self.link.whole):
            return
        self.link = Link(self.world, self)
        hello = WorkerHello(worker=self.name, host=self.host.name, pid=1, shards=SHARDS, generation=self.generation)
        self.link.send(hello)
        for message in (Leaving() if self.leaving else None, self.pending):
            if message is not None:
                self.link.send(message)
        if self.phase == "starting":
            self.phase = "greeting"

    def disconnected(self, link: Link) -> None:
        if self.alive and link is self.link:
            self.link = None
            self.world.later(self.world.soon(1.0), self.connect)

    def say(self, message: Message, again: bool = False) -> None:
        self.pending = message if again else self.pending
        if self.link is not None:
            self.link.send(message)

    def receive(self, message: Message) -> None:
        if not self.alive or self.hung:
            return
        match message:
            case Welcome(joins=joins) if self.phase == "greeting":
                self.phase, self.pending = "preparing", None
                self.loop = 0 if joins else None
                self.world.later(self.world.soon(2.0), self.be_ready)
            case RegroupDue(generation=number) if number == self.generation:
                self.due = True
            case Lost(generation=number) if number == self.generation and self.phase == "training":
                if self.is_still:
                    return
                self.arrive(self.happens_to_stand())
            case Minted() if message.generation > self.generation:
                self.minted(message)
            case Removed(preempted=preempted):
                if preempted:
                    assert self.has_state
                    self.phase = "writing"
                    self.beat(self.generation)
                self.world.later(self.world.soon(25.0) if preempted else 0.0, partial(self.obey, preempted))
            case JobOver():
                self.world.later(self.world.soon(), lambda: self.die(0))
            case Refused(reason=reason):
                assert "given up" in reason or "no worker of this name" in reason, reason
                self.die(1, "refused")

    def obey(self, preempted: bool) -> None:
        if self.alive and not self.hung:
            self.world.checkpoint = max(self.world.checkpoint, self.acts if preempted else 0)
            self.die(75 if preempted else 0)

    def ask_to_leave(self) -> None:
        self.leaving = True
        if self.phase == "starting":
            self.die(-15)
        else:
            self.say(Leaving())

    def die(self, code: int, error: str = "") -> None:
        if not self.alive:
            return
        self.alive = False
        if self.link is not None:
            self.link.cut() if code < 0 else self.link.hang_up()
        self.leave_group(abruptly=True)
        self.world.later(self.world.soon(), lambda: self.host.reap(self, code, error))

    # -- its script

    def be_ready(self) -> None:
        if self.alive and not self.hung:
            self.phase = "waiting"
            unreached = self.unreached()
            self.say(Ready(loop=self.loop, generation=self.generation, unreached=unreached), again=True)
            self.world.later(self.world.soon(), partial(self.look, self.loop))

    def look(self, loop: int | None) -> None:
        """Wait for the loop to be over, as well as to be taken in."""
        if not self.alive or self.hung or self.phase != "waiting" or loop is None or self.loop != loop:
            return
        if loop in self.world.loops_over:
            self.phase, self.loop = "preparing", loop + 1
            self.world.later(self.world.soon(2.0), self.be_ready)
        else:
            self.world.later(self.world.soon(1.0), partial(self.look, loop))

    def minted(self, message: Minted) -> None:
        assert self.phase in ("waiting", "arrived"), self.phase
        group = self.world.groups[message.generation]
        if not self.has_state and not group.begins:
            assert message.loop == self.loop, "taken in where it does not stand"
        self.generation, self.group, self.pending = message.generation, group, None
        self.phase, self.due, self.stops, self.could_not_reach = "training", False, False, ()
        if group.begins:
            self.acts, self.has_state = group.base, True
        elif self.has_state:
            seat = next(seat for seat in message.roster if seat.worker == self.name)
            assert seat.acts == self.acts
        self.world.later(0.5, lambda: self.beat(message.generation))
        group.enter(self)

    def did_not_form(self, group: Group, unreached: tuple[str, ...]) -> None:
        """It could not connect to the others, in spite of all patience."""
        if self.group is group and self.alive and not self.is_still and self.name not in group.formed:
            self.could_not_reach = unreached
            self.arrive(self.happens_to_stand())

    def unreached(self) -> tuple[Unreached, ...]:
        """What it says of the generation that it leaves."""
        return tuple(Unreached(agent=host, why="timed out") for host in self.could_not_reach)

    def formed(self, group: Group) -> None:
        if self.group is not group or not self.alive or self.is_still:
            return
        source = self.world.workers[group.minted.roster[group.minted.source].worker]
        if not self.has_state or self.acts < group.base:
            if source.name not in group.formed and source.group is not group:
                return  # it is gone, as this one is about to notice
            assert source.has_state
            assert source.acts == group.base or source.name in group.formed
            self.acts, self.has_state = group.base, True
        assert self.acts == group.base >= self.world.committed - 1, "goes on from an old state"
        group.formed.add(self.name)
        self.say(Formed(generation=group.minted.generation, seconds={"form": 0.1}))
        self.go_on(group)

    def go_on(self, group: Group) -> None:
        """To the next act, or to where the others wait."""
        if self.acts == len(self.world.script):
            self.finish()
        elif self.stops and self.world.script[self.acts][1]:
            self.arrive(at_boundary=True, abruptly=False)
        else:
            self.world.later(self.world.soon(1.0) * self.slowness, lambda: self.give(group))

    def give(self, group: Group) -> None:
        if self.group is group and self.alive and not self.is_still:
            group.give(self, self.due or self.stops)

    def commit(self, group: Group, act: int) -> None:
        if self.group is not group or not self.alive or self.is_still or self.acts != act:
            return
        self.acts += 1
        if group is not max(self.world.groups.items())[1]:
            return  # it was given up, and does not know it yet
        assert all(member.acts in (act, act + 1) for member in group.members)
        self.commits.append(act)
        assert self.commits == sorted(set(self.commits)), "an act was committed twice"
        assert self.acts <= self.world.committed + 1, "an act was left out"
        self.world.committed = max(self.world.committed, self.acts)
        loop, is_step = self.world.script[act]
        if group.minted.roster[0].worker == self.name and not is_step:
            self.world.loops_over.add(loop)
        if group.minted.roster[0].worker == self.name and self.world.chance.random() < 0.3:
            self.world.checkpoint = max(self.world.checkpoint, self.acts)
        self.stops = self.stops or any(group.given[act].values())
        self.go_on(group)

    def finish(self) -> None:
        self.phase, self.group = "finished", None
        self.say(Finished(digest=f"d{self.acts}"), again=True)

    def beat(self, generation: int) -> None:
        """Signs of life."""
        if self.alive and not self.hung and self.generation == generation and self.phase in ("training", "writing"):
            still_s = 0.0 if self.stuck_since is None else self.world.now - self.stuck_since
            pulse = Pulse(doing="call" if self.is_still else "wait", still_s=still_s)
            loop = self.at() if self.tells_loop else None
            self.say(Progress(acts=self.acts, step=self.acts, loop=loop, pulse=pulse))
            self.world.later(2.5, lambda: self.beat(generation))

    def at(self) -> int:
        return self.world.script[min(self.acts, len(self.world.script) - 1)][0] if self.has_state else self.loop or 0

    # -- others are gone

    def happens_to_stand(self) -> bool:
        if self.group is None or not self.has_state or self.acts == len(self.world.script):
            return False
        is_step = self.world.script[self.acts][1]
        return is_step and self.name not in self.group.given.get(self.acts, {}) and self.world.chance.random() < 0.5

    def notice(self, group: Group, abruptly: bool) -> None:
        """A connection to another member is closed."""
        if self.group is not group or not self.alive or self.is_still:
            return
        if group.is_complete(self.acts) and (not abruptly or self.world.chance.random() < 0.5):
            # It has what it needs, and will come to its next act in vain.
            self.world.later(0.2, lambda: self.notice(group, abruptly=True))
            return
        self.arrive(self.happens_to_stand())

    def arrive(self, at_boundary: bool, abruptly: bool = True) -> None:
        self.world.delicate()
        self.leave_group(abruptly)
        if not self.has_state and self.world.chance.random() < 0.5:
            self.be_ready()
            return
        self.phase = "arrived"
        acts = self.acts if self.has_state else 0
        arrived = Arrived(
            generation=self.generation,
            acts=acts,
            loop=self.at(),
            at_boundary=at_boundary,
            step=acts,
            address="x:1",
            unreached=self.unreached(),
        )
        self.say(arrived, again=True)

    def leave_group(self, abruptly: bool | None) -> None:
        """Close its connections to the others; with None they stay open, and silent."""
        group, self.group = self.group, None
        if group is None or abruptly is None:
            return
        group.broken = True
        for member in group.members:
            self.world.later(self.world.soon(), partial(member.notice, group, abruptly))
