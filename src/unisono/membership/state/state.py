"""All that the coordinator knows, as one value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, PlainSerializer
from rpds import HashTrieSet

from unisono.membership.messages import Arrived, JobOver
from unisono.membership.state.elastic_config import ElasticConfig
from unisono.membership.state.layered_map import LayeredMap
from unisono.membership.state.roster import MintedGeneration
from unisono.membership.state.rows import CANDIDATE, MEMBER, Excluded, Worker
from unisono.membership.state.tables import AgentTable, WorkerTable

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
        settings: the user's settings.
        now: the time of the last event.
        tick_at: the time at which a tick is needed at the latest; None while nothing is waited for.
        workers: the workers by id, in the order of their numbers.
        heard_at: the time of each worker's last message, of the loss of its connection, or of the last order to it,
            whichever is newest.
        agents: the agents by id, in the order in which they came.
        last_worker: the number of the newest worker.
        last_agent: the number of the newest agent.
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
        found = self.workers.of_ids([seat.worker for seat in seats])
        return tuple([worker for worker in found if worker is not None and worker.phase in MEMBER])

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
        found = zip(workers, arrived, strict=True)
        return [worker for worker, message in found if message is None and worker.phase in MEMBER]

    def phase_of(self, worker: Worker) -> str:
        """What it does, for people: of a member, whether it has ``"arrived"`` at the end of its generation."""
        return "arrived" if worker.id in self.arrivals else worker.phase

    def within(self, workers: int) -> int:
        """A number of workers, brought between the fewest and the most."""
        fewest, most = self.limits
        return max(fewest, min(workers, most))
