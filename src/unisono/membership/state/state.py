"""All that the coordinator knows, as one value: settings, workers, agents, and the generation."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, PlainSerializer
from rpds import HashTrieSet

from unisono.errors import JobError
from unisono.membership.messages import Arrived, JobOver, Pulse, Removed
from unisono.membership.state.roster import MintedGeneration
from unisono.membership.state.table import LayeredMap, Table


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """The settings of an elastic job, as the user has given them.

    Attributes:
        smallest: the fewest workers with which training starts. Once it is under way, survivors go on, however few.
        wanted: the number of workers; None for as many as the agents have room for.
        max_restarts: times ``largest`` is how many lost workers are replaced at most.
        restart_on_error: replace a worker that an exception of its script has ended, too.
        failure_timeout_s: seconds without a sign after which a worker or an agent counts as lost.

    Raises:
        JobError: these contradict each other.
    """

    smallest: int = 1
    largest: int = 1
    wanted: int | None = None
    max_restarts: int = 0
    restart_on_error: bool = False
    failure_timeout_s: float = 300.0
    devices: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise JobError(f"{self.smallest}:{self.largest} workers: at least 1, and first the fewest, then the most")
        if self.wanted is not None and not self.smallest <= self.wanted <= self.largest:
            raise JobError(f"{self.wanted} workers are not between {self.smallest} and {self.largest}")
        if self.devices < 1:
            raise JobError(f"workers of {self.devices} devices: at least 1 is needed")
        if self.max_restarts < 0 or not self.failure_timeout_s > 0:
            raise JobError("restarts cannot be fewer than 0, and a timeout has to be longer than 0 s")


# What the coordinator knows of each worker and agent.

T = TypeVar("T")


def changed(value: T, **fields: Any) -> T:
    """The same with other fields. ``dataclasses.replace``, which calls ``__init__``, takes several times as long."""
    new, values = object.__new__(type(value)), value.__dict__.copy()
    count = len(values)
    values.update(fields)
    assert len(values) == count, f"no field of {type(value).__name__}: {', '.join(fields)}"
    object.__setattr__(new, "__dict__", values)
    return new


@dataclass(frozen=True)
class Signs:
    """The newest signs of life of a worker, but for the time of the last one.

    Attributes:
        started: the time at which its process was to start.
        since: the time at which its phase began.
        step: the number of its last committed step.
        samples_per_s: the whole job's samples per second.
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
        why: the reason of its loss; empty while it is not lost.
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
    """A worker without which the job goes on: it and others could not connect, or it failed before it took part."""

    worker: str
    host: str
    why: str


# The workers and the agents, each with its index.


class WorkerTable(Table[Worker]):
    """The workers, in the order of their numbers.

    Marks: ``(phase, leaving, connected)`` · ``(agent, part)``, where the part is ``"candidate"``, ``"member"`` or
    ``"other"`` · ``"waits"`` of a member that waits for others.
    """

    __slots__ = ()
    ROW = Worker

    @classmethod
    def marks(cls, row: Worker) -> tuple[Hashable, ...]:
        """As in the description of this class."""
        waits = row.phase in MEMBER and row.signs.pulse.doing == "wait"
        return _marks_of(row.phase, row.leaving, row.signs.connected, row.agent, waits)

    @classmethod
    def place(cls, row: Worker) -> tuple[int, str]:
        """By number: ``w9`` comes before ``w10``."""
        return len(row.id), row.id

    def of_agent(self, agent: str) -> list[Worker]:
        """The workers of an agent."""
        return self.marked((agent, "candidate"), (agent, "member"), (agent, "other"))

    def at(self, agent: str, *parts: str) -> int:
        """The number of an agent's workers that are candidates, members or others."""
        return self.count(*((agent, part) for part in parts))

    def number(self, phases: tuple[Phase, ...], leaving: bool | None = None, connected: bool | None = None) -> int:
        """The number of workers in these phases; of all, or only of those that leave, or are connected, or not."""
        return self.count(*_stands(phases, leaving, connected))

    def those(
        self, phases: tuple[Phase, ...], leaving: bool | None = None, connected: bool | None = None
    ) -> list[Worker]:
        """The workers themselves."""
        return self.marked(*_stands(phases, leaving, connected))


@lru_cache(2**16)
def _marks_of(phase: Phase, leaving: bool, connected: bool, agent: str, waits: bool) -> tuple[Hashable, ...]:
    """One and the same tuple for all workers that are alike: most that change keep their marks, or all change alike."""
    stands = ((phase, leaving, connected), (agent, PART[phase]))
    return (*stands, "waits") if waits else stands


@cache
def _stands(phases: tuple[Phase, ...], leaving: bool | None, connected: bool | None) -> tuple[Hashable, ...]:
    leavings, connecteds = ((False, True) if wanted is None else (wanted,) for wanted in (leaving, connected))
    return tuple(product(phases, leavings, connecteds))


class AgentTable(Table[Agent]):
    """The agents, in the order in which they came. Their weight is the number of workers that may run now.

    Marks: ``"leaving"`` of those that were asked to, and have not left · ``"free"`` of those that can start another
    worker now · ``"stays"`` of those that were not asked to leave · ``"probed"`` of those of them that answer probes ·
    ``"out"`` of those that are left out · ``"cut"`` of those that do not reach some that came earlier.
    """

    __slots__ = ()
    ROW = Agent

    @classmethod
    def marks(cls, row: Agent) -> tuple[Hashable, ...]:
        """As in the description of this class."""
        free = row.places > row.started and row.signs.connected and not row.probing
        going = "leaving" if row.leaving and not row.left else "left" if row.leaving else "stays"
        probed = going == "stays" and bool(row.probes)
        flags = (("free", free), ("probed", probed), ("out", bool(row.left_out)), ("cut", bool(row.unreached)))
        return (going, *(mark for mark, holds in flags if holds))

    @classmethod
    def place(cls, row: Agent) -> int:
        """As they came."""
        return row.number

    @classmethod
    def weigh(cls, row: Agent) -> int:
        """The number of its workers that may run now."""
        return row.places


if TYPE_CHECKING:
    Times = LayeredMap[float]
    Arrivals = LayeredMap[Arrived]
    Names = HashTrieSet[str]
else:  # as plain values they are what they are made of
    Times = Annotated[Mapping[str, float], AfterValidator(LayeredMap), PlainSerializer(dict)]
    Arrivals = Annotated[Mapping[str, Arrived], AfterValidator(LayeredMap), PlainSerializer(dict)]
    Names = Annotated[list[str], AfterValidator(HashTrieSet), PlainSerializer(sorted)]

SAID_AGAIN = frozenset({"heard_at", "arrivals", "formed_by"})
"""Of a state: what workers say again when they connect to a coordinator that has forgotten it."""


@dataclass(frozen=True)
class State:
    """All that the coordinator knows. Pydantic converts it to plain values, and back.

    Attributes:
        now: the time of the last event.
        tick_at: the time at which a tick is needed at the latest; None while nothing is waited for.
        workers: the workers by id, in the order of their numbers.
        heard_at: the time of each worker's last message, of the loss of its connection, or of the last order to it,
            whichever is newest.
        agents: the agents by id, in the order in which they came.
        last_turn: the number of workers that have become ready.
        turns_seen: the value of ``last_turn`` when the newest generation began.
        generation: the newest one's number; 0 before the first.
        minted: the generation that lives; None while none does.
        loop: the number of the loop that its members are in, if it is known.
        due_since: the time since which it has to end; None while it may go on.
        judged_at: the time at which its split was last judged.
        arrival: the time at which its first member arrived; None while none has.
        arrivals: the message with which each member has arrived that waits for the next one.
        formed_by: members that have worked in it.
        lost: its members that were lost.
        broken: whether its work cannot go on: a member was lost, or has left it in the middle.
        formed: whether all its members have worked in it.
        seconds: the seconds that forming it took on its slowest member, by part.
        unformed: the number of generations in a row, without joiners, that did not form though nobody was lost.
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
    tick_at: float | None = None
    workers: WorkerTable = field(default_factory=WorkerTable)
    heard_at: Times = field(default_factory=LayeredMap)
    agents: AgentTable = field(default_factory=AgentTable)
    last_worker: int = 0
    last_agent: int = 0
    last_turn: int = 0
    turns_seen: int = 0
    generation: int = 0
    minted: MintedGeneration | None = None
    loop: int | None = None
    judged_at: float = 0.0
    due_since: float | None = None
    arrival: float | None = None
    arrivals: Arrivals = field(default_factory=LayeredMap)
    formed_by: Names = field(default_factory=HashTrieSet)
    lost: tuple[str, ...] = ()
    broken: bool = False
    formed: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    unformed: int = 0
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
        workers = self.workers.of_ids([seat.worker for seat in seats])
        return tuple([worker for worker in workers if worker is not None and worker.phase in MEMBER])

    @property
    def candidates(self) -> list[Worker]:
        """Those who are to be taken in."""
        return self.workers.those(CANDIDATE)

    @property
    def finished(self) -> list[Worker]:
        """Those who have all that training comes to."""
        return self.workers.those(("finished",))

    @property
    def staying(self) -> int:
        """The number of members and candidates who were not asked to leave, and whose hosts are not left out."""
        out = [worker for agent in self.agents.marked("out") for worker in self.workers.of_agent(agent.id)]
        going = [worker for worker in out if worker.phase in (*MEMBER, *CANDIDATE) and not worker.leaving]
        return self.workers.number((*MEMBER, *CANDIDATE), leaving=False) - len(going)

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
            wanted = self.agents.weight
        return self.within(wanted)

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of everybody in the generation's roster, by id."""
        return {} if self.minted is None else {seat.worker: rank for rank, seat in enumerate(self.minted.roster)}

    def has_formed(self, worker: Worker) -> bool:
        """Whether a member works in its generation, as far as this was said to this coordinator or the one before."""
        return self.formed or worker.id in self.formed_by

    def is_at_work(self, worker: Worker) -> bool:
        """Whether it is a member of the generation that has not left its work."""
        return worker.phase in MEMBER and worker.id not in self.arrivals

    def at_work(self, workers: Sequence[Worker]) -> list[Worker]:
        """Those of some workers that are."""
        arrived = self.arrivals.of([worker.id for worker in workers])
        both = zip(workers, arrived, strict=True)
        return [worker for worker, message in both if message is None and worker.phase in MEMBER]

    def phase_of(self, worker: Worker) -> str:
        """What it does, for people: of a member, whether it has ``"arrived"`` at the end of its generation."""
        return "arrived" if worker.id in self.arrivals else worker.phase

    def within(self, workers: int) -> int:
        """A number of workers, brought between the fewest and the most."""
        fewest, most = self.limits
        return max(fewest, min(workers, most))
