"""A job that consists of the state machine alone: the test says what happens, and sees what is told to whom."""

import json
from collections.abc import Sequence
from typing import Any, Self

from simulation.checks import check_indexes
from unisono.membership.messages import (
    AgentHello,
    Arrived,
    FromAgent,
    FromWorker,
    JobOver,
    Message,
    NewGeneration,
    Progress,
    Ready,
    WorkerEnded,
    WorkerHello,
)
from unisono.membership.state import (
    Action,
    AgentMessage,
    CloseConnection,
    DropKeys,
    ElasticConfig,
    Event,
    Restarted,
    SaveRows,
    SendToAgent,
    SendToWorkers,
    State,
    Tick,
    WorkerMessage,
    WriteJournal,
    next_deadline,
    step,
)
from unisono.membership.state.roster import MintedGeneration
from unisono.membership.state_log import merge, plain_changes, plain_state

SHARDS = 8


class Job:
    """A job whose workers and agents do what the test says; it keeps what they were told."""

    def __init__(self, smallest: int = 1, largest: int = 8, **settings: Any) -> None:
        self.state = State(settings=ElasticConfig(smallest, largest, **{"failure_timeout_s": 10.0, **settings}))
        self.now = 100.0
        self.told: list[tuple[str, Message]] = []
        self.notes: list[WriteJournal] = []
        self.forgotten: list[int | None] = []
        self.hung_up: list[str] = []
        self._kept = plain_state(self.state)

    def happen(self, event: Event, after: float = 0.0) -> Self:
        self.now += after
        before = self.state
        self.state, actions = step(self.state, event, self.now)
        check_indexes(self.state)
        self._keep(before, event, actions)
        self.told = []
        self.hung_up = []
        for action in actions:
            match action:
                case SendToWorkers(workers, message):
                    self.told += [(worker, message) for worker in workers]
                case SendToAgent(agent, message):
                    self.told.append((agent, message))
                case WriteJournal():
                    self.notes.append(action)
                case DropKeys(below):
                    self.forgotten.append(below)
                case CloseConnection(worker):
                    self.hung_up.append(worker)
        return self

    def _keep(self, before: State, event: Event, actions: Sequence[Action]) -> None:
        """What is written down of each event comes to the whole state."""
        if isinstance(event, Restarted):
            self._kept = plain_state(self.state)
        for action in actions:
            if isinstance(action, SaveRows):
                merge(self._kept, json.loads(json.dumps(plain_changes(before, self.state, action.rows))))
                before = self.state
        merge(self._kept, plain_changes(before, self.state, {}))
        assert self._kept == plain_state(self.state)

    def hear(self, worker: str, message: FromWorker) -> Self:
        return self.happen(WorkerMessage((worker,), message))

    def agent(self, message: FromAgent, agent: str = "a") -> Self:
        return self.happen(AgentMessage(agent, message))

    def enlist(self, workers: int, agent: str = "a", running: Sequence[str] | None = None) -> Self:
        if running is None:
            running = [worker.id for worker in self.state.workers.values() if worker.agent == agent]
        hello = AgentHello(agent=agent, host=f"host-{agent}", workers=workers, running=tuple(running))
        return self.agent(hello, agent)

    def connect(self, *workers: str, generation: int = 0, shards: int = SHARDS, devices: int = 1) -> Self:
        for worker in workers:
            hello = WorkerHello(worker=worker, host="h", pid=1, shards=shards, devices=devices, generation=generation)
            self.hear(worker, hello)
        return self

    def ready(self, *workers: str, loop: int | None = None) -> Self:
        for worker in workers:
            self.connect(worker).hear(worker, Ready(loop=loop))
        return self

    def arrive(self, *workers: str, acts: int = 5, loop: int = 0, at_boundary: bool = True) -> Self:
        for worker in workers:
            self.hear(
                worker,
                Arrived(
                    generation=self.state.generation,
                    acts=acts,
                    loop=loop,
                    at_boundary=at_boundary,
                    step=acts,
                    address=f"{worker}:1",
                ),
            )
        return self

    def end(self, worker: str, code: int = -9, error: str = "", agent: str = "a") -> Self:
        return self.agent(WorkerEnded(worker=worker, code=code, error=error), agent)

    def wait(self, seconds: float) -> Self:
        """Time passes, with all the ticks that are asked for."""
        end = self.now + seconds
        told = []
        while (deadline := next_deadline(self.state)) is not None and deadline <= end:
            self.happen(Tick(), max(0.0, deadline - self.now))
            told += self.told
        self.happen(Tick(), max(0.0, end - self.now))
        self.told = told + self.told
        return self

    def live(self, *workers: str, seconds: float = 10.0) -> Self:
        """Time passes, in which these give signs of life."""
        for _ in range(round(seconds / 2)):
            for worker in workers:
                self.hear(worker, Progress(acts=1, step=1))
            self.wait(2.0)
        return self

    def heard(self, kind: type[Message]) -> list[str]:
        """Who was told a message of this kind by the last event."""
        return [name for name, message in self.told if isinstance(message, kind)]

    def new_generation(self) -> MintedGeneration:
        """The generation that the last event has formed, of which all its workers were told."""
        new = self.minted
        for name, message in self.told:
            if isinstance(message, NewGeneration):
                assert message.generation == new.generation
                assert (message.bounds, message.source, message.loop) == (new.bounds, new.source, new.loop)
                assert message.acts == [seat.acts for seat in new.roster]
                assert message.joiners == {rank for rank, seat in enumerate(new.roster) if seat.joins}
                assert name in {one.worker for one in message.here}
                for one in message.here:
                    seat = new.roster[one.rank]
                    assert (one.worker, one.address) == (seat.worker, seat.address)
        assert set(self.heard(NewGeneration)) == {seat.worker for seat in new.roster}
        return new

    @property
    def minted(self) -> MintedGeneration:
        assert self.state.minted is not None
        return self.state.minted

    @property
    def over(self) -> JobOver:
        assert self.state.over is not None
        return self.state.over

    @property
    def roster(self) -> list[str]:
        return [seat.worker for seat in self.minted.roster]


def training(workers: int = 3, **settings: Any) -> Job:
    """A job whose first generation works."""
    job = Job(**settings).enlist(workers)
    return job.ready(*(f"w{number}" for number in range(1, workers + 1)))


def with_joiner(workers: int = 2, loop: int = 0, **settings: Any) -> Job:
    """A job at work, and one more worker that is ready for a loop."""
    job = training(workers, **settings).enlist(workers + 1)
    return job.ready(f"w{workers + 1}", loop=loop)
