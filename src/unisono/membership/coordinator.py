"""The coordinator at work: what comes in goes through the pure state machine, and what that decides is done.

Nothing here knows sockets or waits: a :class:`Session` is fed the texts that come over its connection, and a
:class:`Peer` takes those that go out.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from unisono.errors import JobError, Unreadable
from unisono.membership import messages
from unisono.membership import state as machine
from unisono.membership.keyvalue import Answer, KeyValue
from unisono.membership.messages import AgentHello, parse
from unisono.membership.state_log import Everything, Journal, StateLog, changes, merge, restored, whole

STATE_LOG = "coordinator.jsonl"
"""In the run folder: from it the coordinator starts again."""

LASTING = ("generation", "last_worker")
"""Numbers that go on even where a job begins anew: none is used twice in a run folder."""

_NOW: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(allow_inf_nan=False)])
_LINES: TypeAdapter[list[dict[str, Any]]] = TypeAdapter(list[dict[str, Any]])


class Peer(Protocol):
    """Whoever is at the other end of a connection."""

    def send(self, text: str) -> None:
        """Send a message, some time; never waits."""

    def hang_up(self) -> None:
        """End the connection after what was sent."""


class Coordinator:
    """The state, the connected peers, the key-value store, and the files in which all that is kept.

    Args:
        run_folder: the job's run folder, which exists. A new coordinator continues with the state of an earlier one
            there.
        settings: the settings of a new job; a job that is continued keeps its own.
        clock: a clock in seconds, from any start, which never goes back.
        fresh: whether to begin anew, whatever an earlier coordinator left. Only the numbers of generations and workers
            go on from there: none is ever used twice in a run folder.
        changed: a function that is called after everything that may move the next deadline.

    Raises:
        JobError: another coordinator works in this folder, or what one left cannot be understood.
    """

    def __init__(
        self,
        run_folder: Path,
        settings: machine.ElasticConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        fresh: bool = False,
        state_log: Callable[[Path, Everything], StateLog] = StateLog,
        journal: Callable[[Path], Journal] = Journal,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_folder = run_folder
        self.values = KeyValue(self._keep)
        self._changed = changed
        self._workers: dict[str, Peer] = {}
        self._agents: dict[str, Peer] = {}
        self._journal = journal(run_folder / "journal.jsonl")
        self._unwritten: list[dict[str, Any]] = []
        self._kept: machine.State | None = None
        self._entry = 0
        self._unkept: dict[str, set[str]] = {}
        self._clock = clock
        self._state_log = state_log(run_folder / STATE_LOG, self._entries)
        self._began, self._stood_at = clock(), 0.0
        self.state = machine.State(settings)
        try:
            self._take_up(fresh)
            self._state_log.rewrite()
            self._kept = self.state
        except (JobError, OSError) as error:
            self._state_log.close()
            raise JobError(f"{STATE_LOG} cannot be used: {error}") from error

    @property
    def connections(self) -> int:
        """How many workers and agents are connected."""
        return len(self._workers) + len(self._agents)

    def now(self) -> float:
        """The job's time in seconds: it stands still while no coordinator runs."""
        return self._stood_at + self._clock() - self._began

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do; None while there is nothing to wait for."""
        deadlines = (machine.next_deadline(self.state), self.values.deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self) -> None:
        """Time has passed."""
        self._answer(self.values.expire(self.now()))
        self.handle(machine.Tick())

    def handle(self, event: machine.Event) -> None:
        """Let something happen: decide, write down, act; in this order, so that nothing is done that is forgotten."""
        is_said_again = _is_said_again(self.state, event)
        self.state, actions = machine.step(self.state, event, self.now())
        notes = (action for action in actions if isinstance(action, machine.WriteJournal))
        self._unwritten = [self._journal.line(note.event, note.fields) for note in notes]
        for action in actions:
            if isinstance(action, machine.SaveRows):
                for table, ids in action.rows.items():
                    self._unkept.setdefault(table, set()).update(ids)
        if self._unwritten or not is_said_again:
            self._keep_state()
        if self._unwritten:
            self._journal.append(self._unwritten)
            self._unwritten = []
        texts: dict[int, str] = {}  # one message often goes to many
        for action in actions:
            self._act(action, texts)
        self._changed()

    def status(self) -> dict[str, Any]:
        """Who takes part and how far they are, for people and programs."""
        return machine.status(self.state)

    def store(self, worker: str, request: messages.StoreRequest) -> None:
        """Serve a request to the key-value store, unless its worker takes part no more: it is about to be told so."""
        if not machine.takes_part(self.state, worker):
            return
        if request.operation == "clock":
            self._answer([(worker, messages.StoreReply(id=request.id, value=str(round(self._clock() * 1e9))))])
            return
        self._answer(self.values.handle(worker, request, self.now()))
        self._changed()

    def greet_worker(self, worker: str, peer: Peer, hello: messages.WorkerHello) -> None:
        """A worker has connected. An older connection of the same worker is one that broke without our noticing."""
        if (older := self._workers.get(worker)) is not None:
            older.hang_up()
            self.values.drop(worker)
        self._workers[worker] = peer
        self.handle(machine.WorkerMessage((worker,), hello))

    def greet_agent(self, agent: str, peer: Peer, hello: AgentHello) -> None:
        """An agent has connected."""
        if (older := self._agents.get(agent)) is not None:
            older.hang_up()
        self._agents[agent] = peer
        self.handle(machine.AgentMessage(agent, hello))

    def worker_gone(self, worker: str, peer: Peer) -> None:
        """This connection of a worker has ended; it counts only if there is no newer one."""
        if self._workers.get(worker) is peer:
            del self._workers[worker]
            self.values.drop(worker)
            self.handle(machine.Disconnected(worker=worker))

    def agent_gone(self, agent: str, peer: Peer) -> None:
        """This connection of an agent has ended."""
        if self._agents.get(agent) is peer:
            del self._agents[agent]
            self.handle(machine.Disconnected(agent=agent))

    def close(self) -> None:
        """Let another coordinator take over."""
        self._state_log.close()

    # -- acting

    def _act(self, action: machine.Action, texts: dict[int, str]) -> None:
        match action:
            case machine.SendToWorkers(workers, message):
                for worker in workers:
                    self._send(self._workers.get(worker), message, texts)
            case machine.SendToAgent(agent, message):
                self._send(self._agents.get(agent), message, texts)
            case machine.CloseConnection(worker):
                if (peer := self._workers.get(worker)) is not None:
                    peer.hang_up()
            case machine.DropKeys(below):
                self._answer(self.values.forget(below))

    def _send(self, peer: Peer | None, message: messages.Message, texts: dict[int, str]) -> None:
        if peer is None:
            return  # it is told what it missed when it connects again
        if id(message) not in texts:
            texts[id(message)] = message.model_dump_json()
        peer.send(texts[id(message)])

    def _answer(self, answers: Iterable[Answer]) -> None:
        for worker, reply in answers:
            if (peer := self._workers.get(worker)) is not None:
                peer.send(reply.model_dump_json())

    # -- remembering

    def _keep(self, entry: Mapping[str, Any]) -> None:
        self._state_log.append(entry)

    def _keep_state(self) -> None:
        """Write down what has changed since the last time; all of it if there was none, or it did not work."""
        self._entry += 1
        if self._kept is None:
            entry = self._whole()
        else:
            entry = self._numbered({"changes": changes(self._kept, self.state, self._unkept)})
        kept = self._state_log.append(entry, durable=bool(self._unwritten))
        self._kept = self.state if kept else None
        self._unkept.clear()

    def _entries(self) -> Iterator[Mapping[str, Any]]:
        yield self._whole()
        yield from self.values.entries()

    def _whole(self) -> dict[str, Any]:
        return self._numbered({"state": whole(self.state)})

    def _numbered(self, content: dict[str, Any]) -> dict[str, Any]:
        # Lines of the journal are kept with the decision that they tell of, for who is killed before they are written.
        return {"entry": self._entry, "now": self.now(), **content, "journal": self._unwritten}

    def _take_up(self, fresh: bool) -> None:
        known: dict[str, Any] | None = None
        newest: dict[str, Any] = {}
        for entry in self._state_log.read():
            if isinstance(entry.get("state"), dict):
                known, newest = entry["state"], entry
            elif known is not None and isinstance(entry.get("changes"), dict):
                if fresh:
                    known |= {name: entry["changes"][name] for name in LASTING if name in entry["changes"]}
                elif _number(entry) != _number(newest) + 1:
                    raise JobError("lines of it are missing; remove it to begin anew")
                else:
                    merge(known, entry["changes"])
                newest = entry
            elif not fresh:
                self.values.restore(entry)
        if known is None:
            return
        if fresh:
            numbers: dict[str, Any] = {name: known.get(name) for name in LASTING}
            if all(type(number) is int and 0 <= number < 2**62 for number in numbers.values()):
                self.state = replace(self.state, **numbers)
            return
        self.state = restored(known)
        try:
            self._stood_at = _NOW.validate_python(newest.get("now"))
            lines = _LINES.validate_python(newest.get("journal", []))
        except ValidationError as error:
            raise JobError("another version of Unisono wrote it; remove it to begin anew") from error
        self._journal.complete(lines)
        self.handle(machine.Restarted())


def _number(entry: Mapping[str, Any]) -> int:
    """The number of an entry of the state log; one that no other follows if it says none."""
    number = entry.get("entry")
    return number if type(number) is int else -2


def _is_said_again(state: machine.State, event: machine.Event) -> bool:
    """Whether nothing is lost if the coordinator forgets this: whoever connects again says it again, or it recurs.

    A worker's first hello is kept: what it is told then, whether it joins, decides what it does from there on.
    """
    match event:
        case machine.WorkerMessage((name,), messages.WorkerHello()):
            worker = state.workers.get(name)
            return worker is None or worker.phase != "asked"
        case machine.WorkerMessage(_, messages.Ready() | messages.Arrived() | messages.Formed() | messages.Progress()):
            return True
        case machine.Disconnected() | machine.Tick():
            return True
    return False


class Session:
    """One connection, from its hello to its end.

    Invalid input is answered with :class:`~unisono.membership.messages.Refused`, ends the connection, and changes
    nothing else.
    """

    MESSAGES: ClassVar[TypeAdapter[Any]]
    """What is taken here."""

    def __init__(self, coordinator: Coordinator, peer: Peer) -> None:
        self._coordinator = coordinator
        self._peer = peer
        self._name = ""
        self._over = False

    def receive(self, data: str | bytes) -> None:
        """Take what came over the connection."""
        if self._over:
            return
        try:
            self._take(data)
        except Unreadable as error:
            self.refuse(str(error))

    def refuse(self, reason: str) -> None:
        """Say why this connection ends."""
        self._over = True
        self._peer.send(messages.Refused(reason=reason).model_dump_json())
        self._peer.hang_up()

    def close(self) -> None:
        """The connection has ended: nothing more is told over it."""
        self._over = True
        if self._name:
            self._gone()

    def _take(self, data: str | bytes) -> None:
        message = parse(self.MESSAGES, data)
        if isinstance(message, messages.WorkerHello | AgentHello) == bool(self._name):
            raise Unreadable("a connection begins with a hello, and has no other")
        if not self._name and message.protocol != messages.PROTOCOL:
            raise Unreadable(
                f"this coordinator speaks version {messages.PROTOCOL}, not {message.protocol}: install one version "
                f"everywhere"
            )
        self._hear(message)

    def _hear(self, message: Any) -> None:
        raise NotImplementedError

    def _gone(self) -> None:
        raise NotImplementedError


class WorkerSession(Session):
    """A worker's connection."""

    MESSAGES = messages.from_worker

    def _hear(self, message: messages.FromWorker) -> None:
        if isinstance(message, messages.WorkerHello):
            self._name = message.worker
            self._coordinator.greet_worker(self._name, self._peer, message)
        elif isinstance(message, messages.StoreRequest):
            self._coordinator.store(self._name, message)
        else:
            self._coordinator.handle(machine.WorkerMessage((self._name,), message))

    def _gone(self) -> None:
        self._coordinator.worker_gone(self._name, self._peer)


class AgentSession(Session):
    """An agent's connection."""

    MESSAGES = messages.from_agent

    def _hear(self, message: messages.FromAgent) -> None:
        if isinstance(message, AgentHello):
            self._name = message.agent
            self._coordinator.greet_agent(self._name, self._peer, message)
        else:
            self._coordinator.handle(machine.AgentMessage(self._name, message))

    def _gone(self) -> None:
        self._coordinator.agent_gone(self._name, self._peer)
