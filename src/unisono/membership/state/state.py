"""The coordinator's state as one value: settings, workers, agents, and the generation."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, PlainSerializer
from rpds import HashTrieSet

from unisono.errors import JobError
from unisono.membership.messages import Arrived, JobOver, Pulse, Removed
from unisono.membership.state.member_table import LayeredMap, Table
from unisono.membership.state.roster import MintedGeneration


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """The user's settings of an elastic job.

    Attributes:
        smallest: the fewest workers with which training starts. Once it is under way, survivors go on, however few.
        wanted: the number of workers; None for as many as the agents have room for.
        max_restarts: the number of lost workers that may be replaced, for each worker of ``largest``.
        restart_on_error: whether a worker is replaced also after an exception in its script.
        failure_timeout_s: the seconds without a sign of life after which a worker or an agent counts as lost.

    Raises:
        JobError: the settings contradict each other.
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


# The rows of the state: workers and agents.

T = TypeVar("T")


def changed(value: T, **fields: Any) -> T:
    """A copy with some fields changed. ``dataclasses.replace`` takes several times as long: it calls ``__init__``."""
    new, values = object.__new__(type(value)), value.__dict__.copy()
    count = len(values)
    values.update(fields)
    assert len(values) == count, f"no field of {type(value).__name__}: {', '.join(fields)}"
    object.__setattr__(new, "__dict__", values)
    return new


@dataclass(frozen=True)
class Signs:
    """The newest signs of life of a worker; the time of the last one is in ``State.heard_at``.

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
"""The phase of a worker:

asked      the worker's agent was asked to start it
preparing  the worker is connected, and runs its script up to the place where it can be taken in
ready      the worker waits at that place
working    the worker is a member of the generation
finished   the worker's script has finished its run
removed    the worker takes part no more, and is about to end
lost       the worker was given up, and is about to be killed
"""

CANDIDATE: tuple[Phase, ...] = ("asked", "preparing", "ready")
"""The phases of workers that are to be taken in."""

MEMBER: tuple[Phase, ...] = ("working",)
"""The phases of workers that train."""


PART: dict[Phase, str] = {
    **dict.fromkeys(get_args(Phase), "other"),
    **dict.fromkeys(CANDIDATE, "candidate"),
    **dict.fromkeys(MEMBER, "member"),
}
"""The part of an agent's workers with which a worker in this phase is counted."""


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
        loop: the number of the loop for which it is ready; None before the first generation, and while it is not ready.
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
    """An agent that is connected, or was until lately.

    Attributes:
        id: the id that it chose for itself.
        number: its place in the order in which agents came.
        started: the number of its workers whose processes may exist.
        given_up: the number of places that are not filled again until a person resizes the job: their workers were
            asked to leave, kept a generation from forming, or failed again and again before they took part.
        failed: the number of its workers in a row that failed before they took part.
        turned_away: the reason for which the last of them failed, if no other is started in its place; else empty.
        probes: the address at which it answers probes; empty if it does not.
        probing: the agents that it was asked to probe, and has not replied about.
        tried_at: the time at which it was last asked to probe, replied, or was left out.
        unreached: agents that came earlier whose hosts and its own do not reach each other, each with the reason.
        left_out: the reason for which no worker of it takes part; empty if they can.
        leaving: whether it was asked to leave.
        left: whether it was told that it has left.
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
        """The number of workers that may run there if they reach the others."""
        return 0 if self.leaving else max(0, self.workers - self.given_up)

    @property
    def places(self) -> int:
        """The number of workers that may run there now."""
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
        """The marks that the description of this class lists."""
        waits = row.phase in MEMBER and row.signs.pulse.doing == "wait"
        return _marks_of(row.phase, row.leaving, row.signs.connected, row.agent, waits)

    @classmethod
    def place(cls, row: Worker) -> tuple[int, str]:
        """The place by number: ``w9`` comes before ``w10``."""
        return len(row.id), row.id

    def of_agent(self, agent: str) -> list[Worker]:
        """The workers of an agent."""
        return self.marked((agent, "candidate"), (agent, "member"), (agent, "other"))

    def count_of_agent(self, agent: str, *parts: str) -> int:
        """The number of an agent's workers that are candidates, members or others."""
        return self.count(*((agent, part) for part in parts))

    def count_in_phases(
        self, phases: tuple[Phase, ...], leaving: bool | None = None, connected: bool | None = None
    ) -> int:
        """The number of workers in these phases; None counts workers that leave or are connected and others."""
        return self.count(*_phase_marks(phases, leaving, connected))

    def in_phases(
        self, phases: tuple[Phase, ...], leaving: bool | None = None, connected: bool | None = None
    ) -> list[Worker]:
        """The workers that :meth:`count_in_phases` counts."""
        return self.marked(*_phase_marks(phases, leaving, connected))


@lru_cache(2**16)
def _marks_of(phase: Phase, leaving: bool, connected: bool, agent: str, waits: bool) -> tuple[Hashable, ...]:
    # Cached: workers that are alike share one tuple, so that a table sees at once that a row has kept its marks.
    stands = ((phase, leaving, connected), (agent, PART[phase]))
    return (*stands, "waits") if waits else stands


@cache
def _phase_marks(phases: tuple[Phase, ...], leaving: bool | None, connected: bool | None) -> tuple[Hashable, ...]:
    leavings, connecteds = ((False, True) if wanted is None else (wanted,) for wanted in (leaving, connected))
    return tuple(product(phases, leavings, connecteds))


class AgentTable(Table[Agent]):
    """The agents, in the order in which they came. Their weight is the number of workers that may run now.

    Marks: ``"leaving"`` of agents that were asked to leave, and have not left · ``"free"`` of those that can start
    another worker now · ``"stays"`` of those that were not asked to leave · ``"probed"`` of those of them that answer
    probes · ``"out"`` of those that are left out · ``"cut"`` of those that do not reach some that came earlier.
    """

    __slots__ = ()
    ROW = Agent

    @classmethod
    def marks(cls, row: Agent) -> tuple[Hashable, ...]:
        """The marks that the description of this class lists."""
        free = row.places > row.started and row.signs.connected and not row.probing
        going = "leaving" if row.leaving and not row.left else "left" if row.leaving else "stays"
        probed = going == "stays" and bool(row.probes)
        flags = (("free", free), ("probed", probed), ("out", bool(row.left_out)), ("cut", bool(row.unreached)))
        return (going, *(mark for mark, holds in flags if holds))

    @classmethod
    def place(cls, row: Agent) -> int:
        """The agent's number."""
        return row.number

    @classmethod
    def weigh(cls, row: Agent) -> int:
        """The number of its workers that may run now."""
        return row.places


if TYPE_CHECKING:
    Times = LayeredMap[float]
    Arrivals = LayeredMap[Arrived]
    Names = HashTrieSet[str]
else:  # what pydantic has to know to convert them to plain values and back
    Times = Annotated[Mapping[str, float], AfterValidator(LayeredMap), PlainSerializer(dict)]
    Arrivals = Annotated[Mapping[str, Arrived], AfterValidator(LayeredMap), PlainSerializer(dict)]
    Names = Annotated[list[str], AfterValidator(HashTrieSet), PlainSerializer(sorted)]

REPORTED_AGAIN = frozenset({"heard_at", "arrivals", "formed_by"})
"""The fields of a state that are not saved: workers send them again when they connect to a restarted coordinator."""


@dataclass(frozen=True)
class State:
    """The coordinator's whole state. Pydantic converts it to plain values and back.

    Attributes:
        now: the time of the last event.
        tick_at: the time at which a tick is needed at the latest; None while nothing is waited for.
        workers: the workers by id, in the order of their numbers.
        heard_at: the time of each worker's last message, of the loss of its connection, or of the last order to it,
            whichever is newest.
        agents: the agents by id, in the order in which they came.
        last_turn: the number of workers that have become ready.
        turns_seen: the value of ``last_turn`` when the newest generation began.
        generation: the number of the newest generation; 0 before the first.
        minted: the present generation; None while there is none.
        loop: the number of the loop that its members are in, if it is known.
        due_since: the time since which the generation has to end; None while it may go on.
        judged_at: the time at which its split was last judged.
        arrival: the time at which its first member arrived; None while none has.
        arrivals: the message of each member that has arrived and waits for the next generation.
        formed_by: members that have worked in it.
        lost: its members that were lost.
        broken: whether its work cannot go on: a member was lost, or has left it in the middle.
        formed: whether all its members have worked in it.
        seconds: the seconds that forming it took on its slowest member, by part.
        unformed: the number of generations in a row, without joiners, that did not form though no worker was lost.
        excluded: workers that were excluded last, the newest at the end.
        wanted: the number of workers that was asked for; None for the number that the settings say.
        shards: the job's number of shards; 0 until a worker has sent it.
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
        """The workers of the generation that are neither gone nor finished, in the order of ranks."""
        seats = () if self.minted is None else self.minted.roster
        workers = self.workers.get_many([seat.worker for seat in seats])
        return tuple([worker for worker in workers if worker is not None and worker.phase in MEMBER])

    @property
    def candidates(self) -> list[Worker]:
        """The workers that are to be taken in."""
        return self.workers.in_phases(CANDIDATE)

    @property
    def finished(self) -> list[Worker]:
        """The workers that have finished, each with the complete result."""
        return self.workers.in_phases(("finished",))

    @property
    def staying(self) -> int:
        """The number of members and candidates that were not asked to leave, and whose hosts are not left out."""
        left_out = [worker for agent in self.agents.marked("out") for worker in self.workers.of_agent(agent.id)]
        going = [worker for worker in left_out if worker.phase in (*MEMBER, *CANDIDATE) and not worker.leaving]
        return self.workers.count_in_phases((*MEMBER, *CANDIDATE), leaving=False) - len(going)

    @property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most workers that can be asked for."""
        most = min(self.settings.largest, self.shards or self.settings.largest)
        return min(self.settings.smallest, most), most

    @property
    def size(self) -> int:
        """The number of workers that are to train."""
        wanted = self.settings.wanted if self.wanted is None else self.wanted
        if wanted is None:
            wanted = self.agents.weight
        return self.clamp(wanted)

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of each worker in the generation's roster, by id."""
        return {} if self.minted is None else {seat.worker: rank for rank, seat in enumerate(self.minted.roster)}

    def has_formed(self, worker: Worker) -> bool:
        """Whether a member has reported, to this coordinator or the one before, that it works in its generation."""
        return self.formed or worker.id in self.formed_by

    def is_at_work(self, worker: Worker) -> bool:
        """Whether a worker is a member of the generation, and has not left its work."""
        return worker.phase in MEMBER and worker.id not in self.arrivals

    def at_work(self, workers: Sequence[Worker]) -> list[Worker]:
        """The workers among these that are members, and have not left the generation's work."""
        arrivals = self.arrivals.get_many([worker.id for worker in workers])
        pairs = zip(workers, arrivals, strict=True)
        return [worker for worker, arrived in pairs if arrived is None and worker.phase in MEMBER]

    def phase_of(self, worker: Worker) -> str:
        """The phase of a worker for people: ``"arrived"`` if it waits at the end of its generation."""
        return "arrived" if worker.id in self.arrivals else worker.phase

    def clamp(self, workers: int) -> int:
        """A number of workers, brought between the fewest and the most."""
        fewest, most = self.limits
        return max(fewest, min(workers, most))
