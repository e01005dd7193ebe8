"""A step of the state machine: the state as an event makes it, and the actions that follow."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unisono.membership.messages import End, JobOver, Lost, Refused, RegroupDue, Removed, ToAgent, ToWorker, TurnedAway
from unisono.membership.state.event import Action, CloseConnection, SaveRows, SendToAgent, SendToWorkers, WriteJournal
from unisono.membership.state.questions import agent_deadline, is_past
from unisono.membership.state.state import MEMBER, PART, Agent, Excluded, State, Worker, WorkerTable, changed

QUICK_S = 5.0
"""A worker that fails within so many seconds after its start delays the start of the next one."""

LONGEST_REASON = 2000  # characters

MOST_EXCLUDED = 16
"""The number of excluded workers that the state keeps, to be shown to people."""


class StateUpdate:
    """The state as one event has made it so far, and the actions that follow from it.

    Attributes:
        state: The state, with all changes so far. Its time is that of the event once anything else has changed.
        pulse_changed: the ids of workers whose pulse has changed.
        touched_agents: the ids of agents that have changed, or whose workers have formed a generation or are in
            another part of the table.
    """

    def __init__(self, state: State, now: float) -> None:
        self.before = state
        self.state = state
        self.now = now
        self.actions: list[Action] = []
        self.pulse_changed: set[str] = set()
        self.touched_agents: set[str] = set()
        self._new_signs: dict[str, float] = {}
        self._rows: dict[str, set[str]] = {"workers": set(), "agents": set()}

    # -- the state

    def set(self, **fields: Any) -> None:
        """Change fields of the state."""
        self.state = changed(self.state, now=self.now, **fields)

    def put(self, worker: Worker, **fields: Any) -> Worker:
        """Change fields of a worker."""
        if fields.get("phase", worker.phase) != worker.phase:
            fields["signs"] = changed(fields.get("signs", worker.signs), since=self.now)
        before, worker = worker, changed(worker, **fields)
        if PART[worker.phase] != PART[before.phase]:
            self.touched_agents.add(worker.agent)
            self._forget_reports(worker)
        if worker.signs.pulse is not before.signs.pulse:
            self.pulse_changed.add(worker.id)
        if _is_to_keep(before, worker, fields.keys()):
            self._rows["workers"].add(worker.id)
        self._set_workers(self.state.workers.put(worker))
        return worker

    def record_signs(self, workers: Iterable[str], at: float | None = None) -> None:
        """Record signs of life of workers: at this time, or at an earlier one."""
        self._new_signs.update(dict.fromkeys(workers, self.now if at is None else at))

    def last_heard(self, worker: str) -> float:
        """The time of the last sign of life of a worker."""
        return self._new_signs.get(worker, self.state.heard_at.get(worker, 0.0))

    def apply_signs(self) -> None:
        """Write all recorded signs of life into the state at once."""
        if self._new_signs:
            self.set(heard_at=self.state.heard_at.update(self._new_signs))
            self._new_signs = {}

    def _forget_reports(self, worker: Worker) -> None:
        if worker.id in self.state.arrivals or worker.id in self.state.formed_by:
            arrivals, formed_by = self.state.arrivals, self.state.formed_by
            self.set(arrivals=arrivals.drop(worker.id), formed_by=formed_by.discard(worker.id))

    @contextmanager
    def in_bulk(self) -> Iterator[None]:
        """Keep the table of workers open in the block, for many changes. States outside the block do not change."""
        self.set(workers=self.state.workers.opened())
        yield
        self.set(workers=self.state.workers.closed())

    def _set_workers(self, workers: WorkerTable) -> None:
        if workers is not self.state.workers:  # an open table changes in place
            self.set(workers=workers)

    def request_workers(self, agent: Agent, workers: Sequence[Worker]) -> None:
        """Have an agent start workers."""
        for worker in workers:
            self._rows["workers"].add(worker.id)
            self._set_workers(self.state.workers.put(worker))
        self.record_signs(worker.id for worker in workers)
        self.put_agent(agent, started=agent.started + len(workers))

    def drop(self, worker: Worker) -> None:
        """Forget a worker whose process is gone."""
        self._rows["workers"].add(worker.id)
        self.touched_agents.add(worker.agent)
        self._set_workers(self.state.workers.drop(worker))
        self._forget_reports(worker)
        self._new_signs.pop(worker.id, None)
        self.set(heard_at=self.state.heard_at.drop(worker.id))
        if (agent := self.state.agents.get(worker.agent)) is not None:
            self.put_agent(agent, started=agent.started - 1)

    def put_agent(self, agent: Agent, **fields: Any) -> None:
        """Change fields of an agent."""
        self.touched_agents.add(agent.id)
        self._rows["agents"].add(agent.id)
        self.set(agents=self.state.agents.put(changed(agent, **fields)))

    def drop_agent(self, agent: Agent) -> None:
        """Forget an agent."""
        self.touched_agents.add(agent.id)
        self._rows["agents"].add(agent.id)
        self.set(agents=self.state.agents.drop(agent))

    def finish(self) -> tuple[State, tuple[Action, ...]]:
        """The state, and the actions."""
        self.apply_signs()
        self.state = self.state if self.state.now == self.now else changed(self.state, now=self.now)
        rows = {table: frozenset(ids) for table, ids in self._rows.items() if ids}
        if rows:
            self.actions.append(SaveRows(rows))
        return self.state, tuple(self.actions)

    # -- actions

    def send(self, worker: Worker, message: ToWorker) -> None:
        """Send a message to a worker."""
        self.send_to_all((worker.id,), message)

    def send_to_all(self, workers: tuple[str, ...], message: ToWorker) -> None:
        """Send one message to workers."""
        self.actions.append(SendToWorkers(workers, message))

    def send_to_agent(self, agent: str, message: ToAgent) -> None:
        """Send a message to an agent."""
        self.actions.append(SendToAgent(agent, message))

    def refuse(self, worker: str, reason: str) -> None:
        """Tell a worker that it is refused, and close its connection."""
        self.actions += [SendToWorkers((worker,), Refused(reason=reason)), CloseConnection(worker)]

    def journal(self, event: str, **fields: Any) -> None:
        """Write a line into the journal."""
        self.actions.append(WriteJournal(event, fields))

    # -- a generation ends

    def request_regroup(self) -> None:
        """Have the generation end: send its members a message, unless they have it already."""
        if self.state.due_since is not None:
            return
        self.set(due_since=self.now)
        self._send_to_working(RegroupDue(generation=self.state.generation))

    def break_generation(self, worker: Worker) -> None:
        """End the generation's work at once, since it has lost this member."""
        due_since = self.now if self.state.due_since is None else self.state.due_since
        self.set(lost=(*self.state.lost, worker.id), due_since=due_since, broken=True)
        self._send_to_working(Lost(generation=self.state.generation, workers=(worker.id,)))

    def wake_members(self) -> None:
        """Wake members that wait in a collective call for a worker that has left it."""
        if self.state.broken:
            return
        self.set(broken=True)
        self._send_to_working(Lost(generation=self.state.generation))

    def _send_to_working(self, message: ToWorker) -> None:
        if at_work := self.state.at_work(self.state.members):
            self.send_to_all(tuple([member.id for member in at_work]), message)

    def lose(self, worker: Worker, why: str, ended: bool = False) -> None:
        """Give up a worker that takes part, or was to take part."""
        self._journal_of_worker("lost", worker, why)
        self._count_loss(worker)
        self._give_up(worker, why, ended)

    def fail_to_join(self, worker: Worker, why: str) -> None:
        """Give up a worker whose script has ended before it took part. The job goes on: others train.

        Another worker is started in its place, ``max_restarts`` times. These starts do not count as the job's restarts,
        since any host may join, and a host that cannot run the script must not use them up.
        """
        agent = self.state.agents[worker.agent]
        self._count_quick_failure(worker)
        if agent.failed < self.state.settings.max_restarts:
            self.put_agent(agent, failed=agent.failed + 1)
            self._journal_of_worker("lost", worker, why)
        else:
            self._exclude(
                worker, f"it never took part, and its place stays empty until somebody resizes the job: {why}"
            )
            why = self.state.excluded[-1].why
            self.put_agent(agent, given_up=agent.given_up + 1, turned_away=self.blame(worker, why))
            self.send_turned_away(agent.id)
        self._give_up(worker, why, ended=True)

    def _give_up(self, worker: Worker, why: str, ended: bool) -> None:
        self.set(blame=self.blame(worker, why))
        if ended:
            self.drop(worker)
        else:
            self.kill(worker, why)
        if worker.signs.connected:
            self.actions.append(CloseConnection(worker.id))
        if worker.phase in MEMBER:
            self.depart(worker)
            self.break_generation(worker)

    def exclude(self, worker: Worker, why: str) -> None:
        """Exclude a worker because it and others could not connect."""
        why = short(why)
        self._exclude(worker, why)
        self.set(blame=self.blame(worker, why))
        if worker.phase in MEMBER:
            self.depart(worker)
        self.remove(self.state.workers[worker.id], why)

    def _exclude(self, worker: Worker, why: str) -> None:
        self._journal_of_worker("excluded", worker, why)
        self.set(excluded=(*self.state.excluded, Excluded(worker.id, worker.host, short(why)))[-MOST_EXCLUDED:])

    def send_turned_away(self, agent: str) -> None:
        """Tell an agent whether places of it stay empty because its workers fail before they take part."""
        host = self.state.agents[agent]
        self.send_to_agent(agent, TurnedAway(reason=host.turned_away, places=host.room))

    def reopen_places(self) -> None:
        """Let places that were given up be filled again."""
        for agent in self.state.agents.values():
            self.put_agent(agent, given_up=0, failed=0, turned_away="")
            if agent.turned_away:
                self.send_turned_away(agent.id)

    def depart(self, worker: Worker) -> None:
        """Count the departure of a member that is lost, or is about to leave on notice."""
        if not worker.leaving:  # a worker that leaves has been counted when it was asked to
            self.set(departures=self.state.departures + 1)

    def kill(self, worker: Worker, why: str) -> None:
        """Give a worker up, and have its agent kill it."""
        self.put(worker, phase="lost", why=short(why))
        self.send_to_agent(worker.agent, End(workers=(worker.id,), how="kill"))

    def remove(self, worker: Worker, reason: str, preempted: bool = False) -> None:
        """Have a worker end although it has not failed."""
        farewell = Removed(reason=reason, preempted=preempted)
        self.put(worker, phase="removed", farewell=farewell)
        self.record_signs([worker.id])
        if worker.phase in MEMBER:
            self.journal("left", worker=worker.id, host=worker.host, reason=reason)
        if worker.phase == "asked":
            self.send_to_agent(worker.agent, End(workers=(worker.id,), how="leave"))
        else:
            self.send(worker, farewell)

    def _count_loss(self, worker: Worker) -> None:
        agent = self.state.agents[worker.agent]
        if worker.leaving or is_past(agent_deadline(self.state, agent), self.now):
            return  # its place is gone with it: no worker is started for it
        settings = self.state.settings
        if self.state.restarts < settings.max_restarts * settings.largest:
            self.set(restarts=self.state.restarts + 1)
        else:
            self.set(unreplaced=self.state.unreplaced + 1)
        self._count_quick_failure(worker)

    def _count_quick_failure(self, worker: Worker) -> None:
        was_quick = self.now - worker.signs.started < QUICK_S
        self.set(quick=self.state.quick + 1 if was_quick else 0)

    # -- the job ends

    def fail(self, reason: str, worker: str = "") -> None:
        """End the job as failed; because of the script of a worker, if one is named."""
        self.end("failed", JobOver(reason=short(reason), worker=worker))

    def end(self, outcome: str, over: JobOver) -> None:
        """End the job, and send its workers and agents how it ended."""
        self.set(over=over)
        self.journal(
            "over",
            outcome=outcome,
            reason=over.reason,
            digest=over.digest,
            main_agent=over.main_agent,
            agents=list(over.agents),
        )
        for worker in self.state.workers.values():
            if worker.phase in ("removed", "lost"):
                continue
            if worker.phase != "asked":
                self.send(worker, over)
            if over.digest and worker.phase != "finished" and not worker.signs.connected:
                # The worker would look for a coordinator that is gone, and its agent would wait for the worker.
                self.send_to_agent(worker.agent, End(workers=(worker.id,), how="drop"))
        for agent in self.state.agents:
            self.send_to_agent(agent, over)

    # -- words

    def _journal_of_worker(self, event: str, worker: Worker, why: str) -> None:
        self.journal(event, worker=worker.id, host=worker.host, rank=self.state.ranks.get(worker.id), why=short(why))

    def blame(self, worker: Worker, why: str) -> str:
        """A sentence for people: which worker, on which host, and why."""
        rank = self.state.ranks.get(worker.id)
        who = worker.id if rank is None else f"{worker.id} (rank {rank})"
        return short(f"{who} on host {worker.host}: {why}")


def _is_to_keep(before: Worker, after: Worker, fields: Iterable[str]) -> bool:
    return any(name != "signs" and getattr(before, name) != getattr(after, name) for name in fields)


def short(text: str) -> str:
    """The text, cut to what fits into a message."""
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"
