"""All that the coordinator knows, as one value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unisono.membership.messages import Arrived, JobOver, NewGeneration, Pulse, Removed
from unisono.membership.state.elastic_config import ElasticConfig


@dataclass(frozen=True, slots=True)
class Signs:
    """The newest signs of life of a worker or an agent.

    Attributes:
        connected: whether it is.
        at: the time of its last message, of the loss of its connection, or of the last order to it, whichever is
            newest.
        started: the time at which its process was to start.
        since: the time at which its phase began.
        step: the number of its last committed step.
        samples_per_s: the whole job's samples per second.
        pulse: the pulse of its main thread.
    """

    connected: bool = False
    at: float = 0.0
    started: float = 0.0
    since: float = 0.0
    step: int = 0
    samples_per_s: float = 0.0
    pulse: Pulse = field(default_factory=Pulse)


Phase = Literal["asked", "preparing", "ready", "working", "arrived", "finished", "removed", "lost"]
"""What a worker does:

asked      its agent was told to start it
preparing  it is connected, and runs its script up to the place where it can be taken in
ready      it waits there
working    it is a member of the generation
arrived    a member that has left the generation's work, and waits for the next one
finished   its script has finished its run
removed    it takes part no more, and is about to end
lost       it is given up, and is about to be killed
"""

CANDIDATE = ("asked", "preparing", "ready")
"""Phases of those who are to be taken in."""

MEMBER = ("working", "arrived")
"""Phases of those who train."""


@dataclass(frozen=True, slots=True)
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
        arrived: the message with which it arrived.
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
    arrived: Arrived | None = None
    farewell: Removed | None = None
    unformed: int = 0
    digest: str = ""
    why: str = ""
    signs: Signs = Signs()


@dataclass(frozen=True, slots=True)
class Agent:
    """What the coordinator knows of an agent that is there, or was lately.

    Attributes:
        id: the id that it chose for itself.
        host: its host's name.
        workers: the number of workers that it can run.
        given_up: places of workers that were asked to leave, with which no generation formed, or that failed again and
            again before they took part: they are not filled again until somebody resizes.
        failed: the number of its workers in a row that failed before they took part.
        turned_away: the end of the last of them, if no other is started in its place; else empty.
        probes: the address at which it answers probes; empty if it does not.
        probing: the agents that it was asked to probe, and has said nothing about.
        probing_since: the time at which it was last asked to probe.
        untried: whether it is not yet known that its host reaches those of all workers.
        left_out: why no worker of it takes part; empty if they can.
        leaving: whether it was asked to leave.
        left: whether it was told that it has.
        signs: its newest signs of life.
    """

    id: str
    host: str
    workers: int
    given_up: int = 0
    failed: int = 0
    turned_away: str = ""
    leaving: bool = False
    left: bool = False
    probes: str = ""
    probing: tuple[str, ...] = ()
    probing_since: float = 0.0
    untried: bool = False
    left_out: str = ""
    signs: Signs = Signs()

    @property
    def room(self) -> int:
        """How many workers may run there, if they reach the others."""
        return 0 if self.leaving else max(0, self.workers - self.given_up)

    @property
    def places(self) -> int:
        """How many workers may run there now."""
        return 0 if self.left_out else self.room


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between two hosts, as far as it is known.

    Attributes:
        one: the id of an agent.
        other: the id of the other agent.
        why: the reason for which there is no connection, for people; empty if there is one.
        at: the time at which this was found out.
    """

    one: str
    other: str
    why: str = ""
    at: float = 0.0


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


@dataclass(frozen=True, slots=True)
class State:
    """All that the coordinator knows. Pydantic converts it to plain values, and back.

    Attributes:
        settings: the user's settings.
        now: the time of the last event.
        workers: the workers by id, in the order of their numbers.
        agents: the agents by id, in the order in which they came.
        last_worker: the number of the newest worker.
        last_turn: the number of workers that have become ready.
        turns_seen: the value of ``last_turn`` when the newest generation began.
        generation: the newest one's number; 0 before the first.
        minted: the generation that lives; None while none does.
        minted_at: the time at which that generation began.
        loop: the number of the loop that its members are in, if it is known.
        due_since: the time since which it has to end; None while it may go on.
        arrival: the time at which its first member arrived; None while none has.
        lost: its members that were lost.
        broken: whether its work cannot go on: a member was lost, or has left it in the middle.
        formed: the members that work in it.
        seconds: the seconds that forming it took on its slowest member, by part.
        unformed: the number of generations in a row, without joiners, that did not form though nobody was lost.
        links: the known connections between hosts, except working ones between hosts of members.
        excluded: workers that were excluded last, the newest at the end.
        wanted: the number of workers that somebody asked for; None for as many as there is room for.
        shards: the job's number of shards; 0 until a worker has said it.
        restarts: the number of lost workers that were replaced.
        unreplaced: the number of lost workers that were not replaced, since no restarts were left.
        quick: the number of workers in a row that failed soon after their start.
        departures: members that were lost or left on notice.
        blame: the reason of the newest loss, for people.
        stopping: whether the job was asked to stop.
        preempting: whether all its members have been removed, so that it goes on later.
        over: the message that says how the job ended; None while it has not.
    """

    settings: ElasticConfig
    now: float = 0.0
    workers: Mapping[str, Worker] = field(default_factory=dict)
    agents: Mapping[str, Agent] = field(default_factory=dict)
    last_worker: int = 0
    last_turn: int = 0
    turns_seen: int = 0
    generation: int = 0
    minted: NewGeneration | None = None
    minted_at: float = 0.0
    loop: int | None = None
    due_since: float | None = None
    arrival: float | None = None
    lost: tuple[str, ...] = ()
    broken: bool = False
    formed: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    unformed: int = 0
    links: tuple[Link, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    wanted: int | None = None
    shards: int = 0
    restarts: int = 0
    unreplaced: int = 0
    quick: int = 0
    departures: int = 0
    blame: str = ""
    stopping: bool = False
    preempting: bool = False
    over: JobOver | None = None

    @property
    def members(self) -> tuple[Worker, ...]:
        """Those of the generation who are neither gone nor finished, in the order of ranks."""
        seats = () if self.minted is None else self.minted.roster
        found = (self.workers.get(seat.worker) for seat in seats)
        return tuple(worker for worker in found if worker is not None and worker.phase in MEMBER)

    @property
    def candidates(self) -> tuple[Worker, ...]:
        """Those who are to be taken in."""
        return tuple(worker for worker in self.workers.values() if worker.phase in CANDIDATE)

    @property
    def finished(self) -> tuple[Worker, ...]:
        """Those who have all that training comes to."""
        return tuple(worker for worker in self.workers.values() if worker.phase == "finished")

    @property
    def staying(self) -> tuple[Worker, ...]:
        """Members and candidates who were not asked to leave."""
        return tuple(worker for worker in self.members + self.candidates if not worker.leaving)

    @property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most workers that can be asked for."""
        most = min(self.settings.largest, self.shards or self.settings.largest)
        return min(self.settings.smallest, most), most

    @property
    def size(self) -> int:
        """How many workers are to train."""
        wanted = self.settings.wanted if self.wanted is None else self.wanted
        if wanted is None:
            wanted = sum(agent.places for agent in self.agents.values())
        return self.within(wanted)

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of everybody in the generation's roster, by id."""
        return {} if self.minted is None else {seat.worker: rank for rank, seat in enumerate(self.minted.roster)}

    def within(self, workers: int) -> int:
        """A number of workers, brought between the fewest and the most."""
        fewest, most = self.limits
        return max(fewest, min(workers, most))
