"""A step of the state machine: the state as an event makes it, and the actions that follow."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unisono.membership.messages import End, JobOver, Lost, Refused, RegroupDue, Removed, ToAgent, ToWorker, TurnedAway
from unisono.membership.state.event import Action, Changed, Hangup, Note, Tell, TellAgent
from unisono.membership.state.questions import agent_deadline, is_past
from unisono.membership.state.state import MEMBER, PART, Agent, Excluded, State, Worker, WorkerTable, changed

QUICK_S = 5.0
"""Seconds: a worker that fails sooner after its start makes the next one wait."""

LONGEST_REASON = 2000  # characters

MOST_EXCLUDED = 16
"""So many are remembered, for people."""


class StateUpdate:
    """The state as one event has made it so far, and the actions that follow from it.

    Attributes:
        state: The state, with all changes so far. Its time is that of the event once anything else has changed.
        heard: the ids of workers whose pulse has changed.
        moved: the ids of agents that have changed, or whose workers are in another part of the table or have formed.
    """

    def __init__(self, state: State, now: float) -> None:
        self.before = state
        self.state = state
        self.now = now
        self.actions: list[Action] = []
        self.heard: set[str] = set()
        self.moved: set[str] = set()
        self._spoken: dict[str, float] = {}
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
            self.moved.add(worker.agent)
            self._let_go(worker)
        if worker.signs.pulse is not before.signs.pulse:
            self.heard.add(worker.id)
        if _is_to_keep(before, worker, fields.keys()):
            self._rows["workers"].add(worker.id)
        self._set_workers(self.state.workers.put(worker))
        return worker

    def hear_of(self, workers: Iterable[str], at: float | None = None) -> None:
        """There are signs of life of workers: now, or at a time before."""
        self._spoken.update(dict.fromkeys(workers, self.now if at is None else at))

    def last_heard(self, worker: str) -> float:
        """The time of the last sign of life of a worker."""
        return self._spoken.get(worker, self.state.heard_at.get(worker, 0.0))

    def note_signs(self) -> None:
        """Take all signs of life into the state, at once."""
        if self._spoken:
            self.set(heard_at=self.state.heard_at.update(self._spoken))
            self._spoken = {}

    def _let_go(self, worker: Worker) -> None:
        """Of a worker that is no member any more, nobody waits to hear what members say of their generation."""
        if worker.id in self.state.arrivals or worker.id in self.state.formed_by:
            arrivals, formed_by = self.state.arrivals, self.state.formed_by
            self.set(arrivals=arrivals.drop(worker.id), formed_by=formed_by.discard(worker.id))

    @contextmanager
    def in_bulk(self) -> Iterator[None]:
        """Many workers change: their table takes them at once. States of before and behind this do not change."""
        self.set(workers=self.state.workers.opened())
        yield
        self.set(workers=self.state.workers.closed())

    def _set_workers(self, workers: WorkerTable) -> None:
        if workers is not self.state.workers:  # an open table is the same one
            self.set(workers=workers)

    def ask_for(self, agent: Agent, workers: Sequence[Worker]) -> None:
        """Have an agent start workers."""
        for worker in workers:
            self._rows["workers"].add(worker.id)
            self._set_workers(self.state.workers.put(worker))
        self.hear_of(worker.id for worker in workers)
        self.put_agent(agent, started=agent.started + len(workers))

    def drop(self, worker: Worker) -> None:
        """Forget a worker whose process is gone."""
        self._rows["workers"].add(worker.id)
        self.moved.add(worker.agent)
        self._set_workers(self.state.workers.drop(worker))
        self._let_go(worker)
        self._spoken.pop(worker.id, None)
        self.set(heard_at=self.state.heard_at.drop(worker.id))
        if (agent := self.state.agents.get(worker.agent)) is not None:
            self.put_agent(agent, started=agent.started - 1)

    def put_agent(self, agent: Agent, **fields: Any) -> None:
        """Change fields of an agent."""
        self.moved.add(agent.id)
        self._rows["agents"].add(agent.id)
        self.set(agents=self.state.agents.put(changed(agent, **fields)))

    def drop_agent(self, agent: Agent) -> None:
        """Forget an agent."""
        self.moved.add(agent.id)
        self._rows["agents"].add(agent.id)
        self.set(agents=self.state.agents.drop(agent))

    def finish(self) -> tuple[State, tuple[Action, ...]]:
        """The state, and the actions."""
        self.note_signs()
        self.state = self.state if self.state.now == self.now else changed(self.state, now=self.now)
        rows = {table: frozenset(ids) for table, ids in self._rows.items() if ids}
        if rows:
            self.actions.append(Changed(rows))
        return self.state, tuple(self.actions)

    # -- what is to be done

    def tell(self, worker: Worker, message: ToWorker) -> None:
        """Have a worker told."""
        self.tell_all((worker.id,), message)

    def tell_all(self, workers: tuple[str, ...], message: ToWorker) -> None:
        """Have workers told the same."""
        self.actions.append(Tell(workers, message))

    def tell_agent(self, agent: str, message: ToAgent) -> None:
        """Have an agent told."""
        self.actions.append(TellAgent(agent, message))

    def refuse(self, worker: str, reason: str) -> None:
        """Have a worker told that it has no business here."""
        self.actions += [Tell((worker,), Refused(reason=reason)), Hangup(worker)]

    def note(self, event: str, **fields: Any) -> None:
        """Have a line written into the journal."""
        self.actions.append(Note(event, fields))

    # -- a generation ends

    def call_members(self) -> None:
        """The generation has to end: its members are told, unless they know."""
        if self.state.due_since is not None:
            return
        self.set(due_since=self.now)
        self._tell_working(RegroupDue(generation=self.state.generation))

    def break_up(self, worker: Worker) -> None:
        """The generation has lost a member, so that its work cannot go on."""
        due_since = self.now if self.state.due_since is None else self.state.due_since
        self.set(lost=(*self.state.lost, worker.id), due_since=due_since, broken=True)
        self._tell_working(Lost(generation=self.state.generation, workers=(worker.id,)))

    def wake_members(self) -> None:
        """Somebody has left the generation's work in the middle of it: whoever waits there for it stops waiting."""
        if self.state.broken:
            return
        self.set(broken=True)
        self._tell_working(Lost(generation=self.state.generation))

    def _tell_working(self, message: ToWorker) -> None:
        if at_work := self.state.at_work(self.state.members):
            self.tell_all(tuple([member.id for member in at_work]), message)

    def lose(self, worker: Worker, why: str, ended: bool = False) -> None:
        """A worker that was to take part, or did, is given up."""
        self._note("lost", worker, why)
        self._count(worker)
        self._part_with(worker, why, ended)

    def fail_to_join(self, worker: Worker, why: str) -> None:
        """A worker's script has ended before it took part, which is no reason to end what works.

        Another one tries, as often as any worker is replaced. What strangers do costs the job none of its restarts.
        """
        agent = self.state.agents[worker.agent]
        self._pace(worker)
        if agent.failed < self.state.settings.max_restarts:
            self.put_agent(agent, failed=agent.failed + 1)
            self._note("lost", worker, why)
        else:
            self._exclude(
                worker, f"it never took part, and its place stays empty until somebody resizes the job: {why}"
            )
            why = self.state.excluded[-1].why
            self.put_agent(agent, given_up=agent.given_up + 1, turned_away=self.blame(worker, why))
            self.tell_turned_away(agent.id)
        self._part_with(worker, why, ended=True)

    def _part_with(self, worker: Worker, why: str, ended: bool) -> None:
        self.set(blame=self.blame(worker, why))
        if ended:
            self.drop(worker)
        else:
            self.kill(worker, why)
        if worker.signs.connected:
            self.actions.append(Hangup(worker.id))
        if worker.phase in MEMBER:
            self.depart(worker)
            self.break_up(worker)

    def exclude(self, worker: Worker, why: str) -> None:
        """A worker cannot take part, since it and others could not connect."""
        why = short(why)
        self._exclude(worker, why)
        self.set(blame=self.blame(worker, why))
        if worker.phase in MEMBER:
            self.depart(worker)
        self.remove(self.state.workers[worker.id], why)

    def _exclude(self, worker: Worker, why: str) -> None:
        self._note("excluded", worker, why)
        self.set(excluded=(*self.state.excluded, Excluded(worker.id, worker.host, short(why)))[-MOST_EXCLUDED:])

    def tell_turned_away(self, agent: str) -> None:
        """Have an agent told whether places of it stay empty, since its workers fail before they take part."""
        host = self.state.agents[agent]
        self.tell_agent(agent, TurnedAway(reason=host.turned_away, places=host.room))

    def fill_again(self) -> None:
        """Places that were given up are filled again."""
        for agent in self.state.agents.values():
            self.put_agent(agent, given_up=0, failed=0, turned_away="")
            if agent.turned_away:
                self.tell_turned_away(agent.id)

    def depart(self, worker: Worker) -> None:
        """A member is lost, or is about to leave on notice."""
        if not worker.leaving:  # else it has been counted
            self.set(departures=self.state.departures + 1)

    def kill(self, worker: Worker, why: str) -> None:
        """Have a worker killed."""
        self.put(worker, phase="lost", why=short(why))
        self.tell_agent(worker.agent, End(workers=(worker.id,), how="kill"))

    def remove(self, worker: Worker, reason: str, preempted: bool = False) -> None:
        """A worker is to end, for nobody's fault."""
        farewell = Removed(reason=reason, preempted=preempted)
        self.put(worker, phase="removed", farewell=farewell)
        self.hear_of([worker.id])
        if worker.phase in MEMBER:
            self.note("left", worker=worker.id, host=worker.host, reason=reason)
        if worker.phase == "asked":
            self.tell_agent(worker.agent, End(workers=(worker.id,), how="leave"))
        else:
            self.tell(worker, farewell)

    def _count(self, worker: Worker) -> None:
        """What a loss means for those that come instead: whether any may, and how long they wait."""
        agent = self.state.agents[worker.agent]
        if worker.leaving or is_past(agent_deadline(self.state, agent), self.now):
            return  # its place is gone with it, and nobody comes instead
        settings = self.state.settings
        if self.state.restarts < settings.max_restarts * settings.largest:
            self.set(restarts=self.state.restarts + 1)
        else:
            self.set(unreplaced=self.state.unreplaced + 1)
        self._pace(worker)

    def _pace(self, worker: Worker) -> None:
        was_quick = self.now - worker.signs.started < QUICK_S
        self.set(quick=self.state.quick + 1 if was_quick else 0)

    # -- the job ends

    def fail(self, reason: str, worker: str = "") -> None:
        """The job has failed, for the script of a worker if there is one."""
        self.end("failed", JobOver(reason=short(reason), worker=worker))

    def end(self, outcome: str, over: JobOver) -> None:
        """The job is over."""
        self.set(over=over)
        self.note(
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
                self.tell(worker, over)
            if over.digest and worker.phase != "finished" and not worker.signs.connected:
                # It would look for a coordinator that is gone, and its agent would wait for it.
                self.tell_agent(worker.agent, End(workers=(worker.id,), how="drop"))
        for agent in self.state.agents:
            self.tell_agent(agent, over)

    # -- words

    def _note(self, event: str, worker: Worker, why: str) -> None:
        self.note(event, worker=worker.id, host=worker.host, rank=self.state.ranks.get(worker.id), why=short(why))

    def blame(self, worker: Worker, why: str) -> str:
        """Who it was, and why, for people."""
        rank = self.state.ranks.get(worker.id)
        who = worker.id if rank is None else f"{worker.id} (rank {rank})"
        return short(f"{who} on host {worker.host}: {why}")


def _is_to_keep(before: Worker, after: Worker, fields: Iterable[str]) -> bool:
    """Whether more has changed than the worker says again when it connects."""
    return any(name != "signs" and getattr(before, name) != getattr(after, name) for name in fields)


def short(text: str) -> str:
    """What fits into a message."""
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"
