"""A worker's main thread: it runs the script, with the others of its generation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from simulation.settings import FORMING_S, PROBING_S
from unisono.membership.messages import (
    Arrived,
    Finished,
    Formed,
    JobOver,
    Lost,
    NewGeneration,
    Ready,
    Refused,
    RegroupDue,
    Removed,
    StoreReply,
    StoreRequest,
    ToWorker,
    Unreached,
    Welcome,
)
from unisono.train.group.elastic import transfer_in

if TYPE_CHECKING:
    from simulation.group import Call, Group, Key
    from simulation.process import Process
    from simulation.script import Act, Life

HAND_OVER = ("size", "skeleton", "tensors")
"""Broadcasts of which the one in which the state is handed over consists: it is taken as a whole after the last."""


class Training:
    """What a worker's main thread does.

    Attributes:
        phase: starting, greeting, preparing, waiting (to be taken in), arrived, training, writing, finished.
        acts: that it has completed in this life of the job.
        steps: that its weights have seen.
        holds: whether it has a state to go on from.
    """

    def __init__(self, process: Process) -> None:
        self.world, self.process, self.name = process.world, process, process.name
        self.phase = "starting"
        self.stuck_since: float | None = None  # it comes no further, and the connection is in order
        self.slowness = 1.0
        self.generation = 0
        self.group: Group | None = None
        self.life: Life | None = None
        self.acts = self.steps = 0
        self.holds = False
        self.joins = False
        self.due = self.stops = False
        self._unreached: tuple[Unreached, ...] = ()
        self._loop: int | None = None
        self._number = 0
        self._read: list[str] = []
        self._told: Any = None
        self._in_call: Call | None = None
        self._commits: list[tuple[int, int]] = []

    @property
    def is_still(self) -> bool:
        return self.process.hung or self.stuck_since is not None

    @property
    def is_able(self) -> bool:
        return self.process.alive and not self.is_still

    @property
    def next_act(self) -> Act | None:
        if self.life is None or not self.holds or self.acts == len(self.life.acts):
            return None
        return self.life.acts[self.acts]

    @property
    def loop_now(self) -> int:
        if self.next_act is not None:
            return self.next_act.loop
        return len(self.world.script.steps) if self.holds else self._loop or 0

    # -- what it is told

    def connected(self) -> None:
        if self.phase == "starting":
            self.phase = "greeting"

    def hear(self, message: ToWorker) -> None:
        match message:
            case Welcome(joins=joins) if self.phase == "greeting":
                self.phase, self.joins = "preparing", joins
                self._loop = 0 if joins else None
                self.world.later(self.world.soon(2.0), self.follow)
            case RegroupDue(generation=number) if number == self.generation:
                self.due = True
            case Lost(generation=number) if number == self.generation and self.phase == "training":
                if not self.is_still:
                    self.arrive(self.happens_to_stand())
            case NewGeneration() if message.generation > self.generation:
                self.minted(message)
            case Removed(preempted=preempted):
                if preempted:
                    assert self.holds
                    self.phase = "writing"
                self.world.later(self.world.soon(25.0) if preempted else 0.0, partial(self.obey, preempted))
            case JobOver():
                self.world.later(self.world.soon(), lambda: self.process.die(0))
            case Refused(reason=reason):
                assert "given up" in reason or "no worker of this name" in reason, reason
                self.process.die(1, "refused")

    def obey(self, preempted: bool) -> None:
        if self.process.alive and not self.process.hung:
            self.world.checkpoint = max(self.world.checkpoint, self.steps if preempted else 0)
            self.process.die(75 if preempted else 0)

    # -- until it is taken in

    def follow(self) -> None:
        """On through the script: a joiner gets the results of calls from those who made them."""
        if not self.is_able or self.phase != "preparing":
            return
        script = self.world.script
        if self._loop is None:
            self.be_ready()
        elif self._number < script.calls[self._loop]:
            self.process.watch(f"act/{self._loop}/{self._number}", self.known)
        elif self._loop < len(script.steps):
            self.be_ready()

    def known(self, value: str) -> None:
        self._read.append(value)
        self._number += 1
        self.world.later(self.world.soon(1.0), self.follow)

    def be_ready(self) -> None:
        self.phase = "waiting"
        self.process.say(Ready(loop=self._loop, generation=self.generation, unreached=self._unreached))
        if (loop := self._loop) is not None:
            self.process.watch(f"loop/{loop}", partial(self.over, loop))

    def over(self, loop: int, value: str) -> None:
        """The others are through with a loop."""
        if self.is_able and self.phase == "waiting" and self._loop == loop:
            self._read.append(value)
            self.phase, self._loop, self._number = "preparing", loop + 1, 0
            self.world.later(self.world.soon(2.0), self.follow)

    # -- a generation begins

    def minted(self, message: NewGeneration) -> None:
        assert self.phase in ("waiting", "arrived"), self.phase
        group = self.world.group_of(message)
        if not self.holds and not group.begins:
            assert message.loop == self._loop, "taken in where it does not stand"
            assert all(value == group.life.value(value.split(" of ")[0]) for value in self._read), "read what is old"
        self.generation, self.group, self.life = message.generation, group, group.life
        self.process.outbox.enter(message.generation)
        self.phase, self.due, self.stops, self._unreached = "training", False, False, ()
        if group.begins and not self.holds:
            self.acts, self.steps, self.holds = 0, group.life.steps, True
        elif self.holds:
            rank = next(one.rank for one in message.here if one.worker == self.name)
            assert message.acts[rank] == self.acts
        self._meet(group)

    def _meet(self, group: Group) -> None:
        """Find the others, over the coordinator's store."""
        number, size = self.generation, len(group.minted.roster)
        mine = StoreRequest(id=0, operation="set", keys=(f"g{number}/{group.rank(self.name)}",))
        all_keys = tuple(f"g{number}/{other}" for other in range(size))
        everybody = StoreRequest(id=0, operation="wait", keys=all_keys, timeout_s=self.world.settings.failure_timeout_s)
        self.process.ask(mine, lambda reply: None)
        self.process.ask(everybody, partial(self._met, group))

    def _met(self, group: Group, reply: StoreReply) -> None:
        if self.group is not group or not self.is_able:
            return
        if reply.error:
            self.arrive(at_boundary=False)
        else:
            network, host = self.world.network, self.process.host.name
            unreached = tuple(other for other in group.hosts if not network.reaches(host, other))
            if unreached:
                self.world.later(PROBING_S + self.world.soon(), partial(self.did_not_form, group, unreached))
            self._call("meet", 0, None)

    def did_not_form(self, group: Group, unreached: tuple[str, ...]) -> None:
        """It could not connect to the others, in spite of all patience."""
        if self.group is group and self.is_able and self.name not in group.connected:
            self._unreached = tuple(Unreached(agent=host, why="timed out") for host in unreached)
            self.arrive(self.happens_to_stand())

    def _hand_over(self, group: Group, stage: int) -> None:
        """The next collective of the hand-over."""
        behind = transfer_in(group.told, {}).behind
        if stage < len(HAND_OVER) and behind:
            gives = self.name == group.source
            self._call("hand over", stage, (self.acts, self.steps) if gives else None, source=group.source)
        else:
            self._call("engine", 0, None)

    def _handed(self, group: Group, stage: int, told: Any) -> None:
        if stage == 0:
            self._told = told
        assert told == self._told, "the source has changed within the hand-over"
        rank = group.rank(self.name)
        if stage + 1 == len(HAND_OVER) and rank in transfer_in(group.told, {}).behind:
            self._take_over(group, *told)
        self._hand_over(group, stage + 1)

    def _take_over(self, group: Group, acts: int, steps: int) -> None:
        act = group.life.acts[acts - 1] if acts else None
        self.acts, self.steps, self.holds = acts, steps, True
        if self.joins:
            self.joins = False
        elif act is not None:
            self._tell_joiners(act)

    def _formed(self, group: Group) -> None:
        assert self.holds
        assert self.acts == group.base >= group.life.committed - 1, "goes on from an old state"
        assert not self.joins
        self.process.say(Formed(generation=group.minted.generation, seconds={"form": 0.1}))
        self.go_on(group)

    # -- its generation's work

    def go_on(self, group: Group) -> None:
        """To the next act, or to where the others wait."""
        if self.next_act is None:
            self.finish()
        elif self.stops and self.next_act.kind == "step":
            self.arrive(at_boundary=True, abruptly=False)
        else:
            self.world.later(self.world.soon(1.0) * self.slowness, lambda: self.give(group))

    def give(self, group: Group) -> None:
        if self.group is group and self.is_able:
            self._call("act", self.acts, self.due or self.stops)

    def _call(self, kind: str, number: int, part: Any, source: str | None = None) -> None:
        assert self.group is not None
        self._in_call = self.group.take_part(self, (kind, number), part, source)

    def returns(self, group: Group, key: Key, call: Call) -> None:
        """A collective call returns."""
        if self.group is not group or not self.is_able or self._in_call is not call:
            return
        self._in_call = None
        match key:
            case "meet", _ if not group.connects:  # some time it gives up, and cannot say because of whom
                self.world.later(FORMING_S, partial(self.did_not_form, group, ()))
            case "meet", _:
                group.connected.add(self.name)
                self.process.lead(group.rank(self.name) == 0)
                self._hand_over(group, 0)
            case "hand over", stage:
                self._handed(group, stage, call.parts[group.source])
            case "engine", _:
                self._formed(group)
            case _, act:
                self._commit(group, act, any(call.parts.values()))

    def _commit(self, group: Group, act: int, stops: bool) -> None:
        assert self.acts == act
        done, life = group.life.acts[act], group.life
        self.acts += 1
        self.steps += done.kind == "step"
        assert self.steps == life.steps_after(self.acts), "the weights are not those that the count says"
        if group is not max(self.world.groups.items())[1]:
            return  # it was given up, and does not know it yet
        assert all(member.acts in (act, act + 1) for member in group.members)
        self._commits.append((life.number, act))
        assert self._commits == sorted(set(self._commits)), "an act was committed twice"
        assert self.acts <= life.committed + 1, "an act was left out"
        life.committed = max(life.committed, self.acts)
        self._tell_joiners(done)
        if group.rank(self.name) == 0 and self.world.chance.random() < 0.3:
            self.world.checkpoint = max(self.world.checkpoint, self.steps)
        self.stops = self.stops or stops
        self.go_on(group)

    def _tell_joiners(self, act: Act) -> None:
        assert self.life is not None
        if act.kind != "step":
            name = f"act/{act.loop}/{act.number}" if act.kind == "call" else f"loop/{act.loop}"
            self.life.published.setdefault(name, self.world.now)
            self.process.publish(name, self.life.value(name))

    def finish(self) -> None:
        self.phase, self.group = "finished", None
        self.process.say(Finished(digest=f"d{self.steps}"))

    # -- others are gone

    def happens_to_stand(self) -> bool:
        if self.group is None or self.next_act is None or self.next_act.kind != "step" or self.joins:
            return False
        call = self.group.calls.get(("act", self.acts))
        return (call is None or self.name not in call.parts) and self.world.chance.random() < 0.5

    def notice(self, group: Group, abruptly: bool) -> None:
        """A connection to another member is closed."""
        if self.group is not group or not self.is_able:
            return
        is_served = self._in_call is not None and self._in_call.is_complete
        if is_served and (not abruptly or self.world.chance.random() < 0.5):
            # It has what it needs, and will come to its next act in vain.
            self.world.later(0.2, lambda: self.notice(group, abruptly=True))
            return
        self.arrive(self.happens_to_stand())

    def arrive(self, at_boundary: bool, abruptly: bool = True) -> None:
        self.world.delicate()
        self.leave_group(abruptly)
        if self.joins:  # until it has their state it has no part in what the others do
            self.be_ready()
            return
        self.phase = "arrived"
        acts = self.acts if self.holds else 0
        arrived = Arrived(
            generation=self.generation,
            acts=acts,
            loop=self.loop_now,
            at_boundary=at_boundary,
            step=acts,
            address="x:1",
            unreached=self._unreached,
        )
        self.process.say(arrived)

    def leave_group(self, abruptly: bool | None) -> None:
        """Close its connections to the others; with None they stay open, and silent."""
        group, self.group, self._in_call = self.group, None, None
        if group is None or abruptly is None:
            return
        group.broken = True
        for member in group.members:
            self.world.later(self.world.soon(), partial(member.notice, group, abruptly))
