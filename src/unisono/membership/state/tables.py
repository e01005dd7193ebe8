"""The workers and the agents, each with its index."""

from collections.abc import Hashable
from functools import cache, lru_cache
from itertools import product

from unisono.membership.state.rows import MEMBER, PART, Agent, Phase, Worker
from unisono.membership.state.table import Table


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
    leavings, connecteds = ((False, True) if each is None else (each,) for each in (leaving, connected))
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
