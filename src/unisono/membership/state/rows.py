"""What the coordinator knows of each worker and agent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from unisono.membership.messages import Pulse, Removed

T = TypeVar("T")


def changed(value: T, **fields: Any) -> T:
    """The same with other fields. ``dataclasses.replace``, which calls ``__init__``, takes several times as long."""
    new, found = object.__new__(type(value)), value.__dict__.copy()
    count = len(found)
    found.update(fields)
    assert len(found) == count, f"no field of {type(value).__name__}: {', '.join(fields)}"
    object.__setattr__(new, "__dict__", found)
    return new


@dataclass(frozen=True)
class Signs:
    """The newest signs of life of a worker, but for the time of the last one.

    Attributes:
        connected: whether it is.
        started: the time at which its process was to start.
        since: the time at which its phase began.
        step: the number of its last committed step.
        samples_per_s: the whole job's samples per second.
        pulse: the pulse of its main thread.
    """

    connected: bool = False
    started: float = 0.0
    since: float = 0.0
    step: int = 0
    samples_per_s: float = 0.0
    pulse: Pulse = field(default_factory=Pulse)


@dataclass(frozen=True, slots=True)
class AgentSigns:
    """The newest signs of life of an agent.

    Attributes:
        connected: whether it is.
        at: the time of its last hello, or of the loss of its connection.
    """

    connected: bool = False
    at: float = 0.0


Phase = Literal["asked", "preparing", "ready", "working", "finished", "removed", "lost"]
"""What a worker does:

asked      its agent was told to start it
preparing  it is connected, and runs its script up to the place where it can be taken in
ready      it waits there
working    it is a member of the generation
finished   its script has finished its run
removed    it takes part no more, and is about to end
lost       it is given up, and is about to be killed
"""

CANDIDATE: tuple[Phase, ...] = ("asked", "preparing", "ready")
"""Phases of those who are to be taken in."""

MEMBER: tuple[Phase, ...] = ("working",)
"""Phases of those who train."""


PART: dict[Phase, str] = {
    **dict.fromkeys(get_args(Phase), "other"),
    **dict.fromkeys(CANDIDATE, "candidate"),
    **dict.fromkeys(MEMBER, "member"),
}
"""Of each phase, the part of an agent's workers that they are counted with."""


@dataclass(frozen=True)
class Worker:
    """A worker whose process may exist.

    Attributes:
        id: its id, never used again.
        agent: the agent that runs it.
        phase: its present phase.
        host: its host's name; empty until it has connected.
        pid: its process id there; 0 until it has connected.
        joins: whether training was under way when it connected.
        leaving: whether it was asked to leave.
        is_faulty: whether it computes wrong results: it is in no generation any more.
        loop: the number of the loop for which it is ready; None while it is not.
        address: the address at which its peers reach it.
        turn: its place in the order in which workers became ready.
        farewell: the message that told it to leave.
        unformed: the number of generations with it that did not form, though nobody was lost.
        digest: the digest of its final weights.
        why: the reason of its loss; empty while it is not lost.
        signs: its newest signs of life.
    """

    id: str
    agent: str
    phase: Phase = "asked"
    host: str = ""
    pid: int = 0
    joins: bool = False
    leaving: bool = False
    is_faulty: bool = False
    loop: int | None = None
    address: str = ""
    turn: int = 0
    farewell: Removed | None = None
    unformed: int = 0
    digest: str = ""
    why: str = ""
    signs: Signs = Signs()


@dataclass(frozen=True)
class Agent:
    """What the coordinator knows of an agent that is there, or was lately.

    Attributes:
        id: the id that it chose for itself.
        host: its host's name.
        workers: the number of workers that it can run.
        number: its place in the order in which agents came.
        started: the number of its workers whose processes may exist.
        given_up: places of workers that were asked to leave, with which no generation formed, or that failed again and
            again before they took part: they are not filled again until somebody resizes.
        failed: the number of its workers in a row that failed before they took part.
        turned_away: the end of the last of them, if no other is started in its place; else empty.
        probes: the address at which it answers probes; empty if it does not.
        probing: the agents that it was asked to probe, and has said nothing about.
        tried_at: the time at which it was last asked to probe, has answered, or was left out.
        unreached: agents that came earlier whose hosts and its own do not reach each other, each with the reason.
        left_out: why no worker of it takes part; empty if they can.
        leaving: whether it was asked to leave.
        left: whether it was told that it has.
        signs: its newest signs of life.
    """

    id: str
    host: str
    workers: int
    number: int = 0
    started: int = 0
    given_up: int = 0
    failed: int = 0
    turned_away: str = ""
    leaving: bool = False
    left: bool = False
    probes: str = ""
    probing: tuple[str, ...] = ()
    tried_at: float = 0.0
    unreached: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""
    signs: AgentSigns = AgentSigns()

    @property
    def room(self) -> int:
        """How many workers may run there, if they reach the others."""
        return 0 if self.leaving else max(0, self.workers - self.given_up)

    @property
    def places(self) -> int:
        """How many workers may run there now."""
        return 0 if self.left_out else self.room


@dataclass(frozen=True, slots=True)
class Excluded:
    """A worker without which the job goes on: it and others could not connect, or it failed before it took part.

    Attributes:
        worker: its id.
        host: the name of its host.
        why: the reason, for people.
    """

    worker: str
    host: str
    why: str
