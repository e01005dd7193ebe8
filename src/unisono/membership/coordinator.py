"""The coordinator: it turns messages into events of the pure state machine, and does the actions that follow.

It uses no sockets and never waits: a :class:`Session` receives the texts of its connection, and a :class:`Peer` sends.
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
from unisono.membership.state_log import EntrySource, Journal, StateLog, merge, plain_changes, plain_state, state_of

STATE_LOG = "coordinator.jsonl"
"""The file in the run folder from which a coordinator starts again."""

LASTING = ("generation", "last_worker")
"""Numbers that go on even if a job begins anew, so that none is used twice in a run folder."""

_NOW: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(allow_inf_nan=False)])
_LINES: TypeAdapter[list[dict[str, Any]]] = TypeAdapter(list[dict[str, Any]])


class Peer(Protocol):
    """The sending side of a connection to a worker or an agent."""

    def send(self, text: str) -> None:
        """Queue a message; never waits."""

    def hang_up(self) -> None:
        """Close the connection once all queued messages are sent."""


class Coordinator:
    """The state, the connected workers and agents, the key-value store, and the files that keep them.

    Args:
        run_folder: the job's run folder, which exists. A new coordinator continues with the state of an earlier one
            there.
        settings: the settings of a new job; a job that is continued keeps its own.
        clock: a clock in seconds, from any start, which never goes back.
        fresh: whether to begin anew, and to go on only with the numbers of generations and workers of an earlier
            coordinator.
        changed: a function that is called after each change that may move the next deadline.

    Raises:
        JobError: another coordinator works in this folder, or the state of an earlier one cannot be read.
    """

    def __init__(
        self,
        run_folder: Path,
        settings: machine.ElasticConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        fresh: bool = False,
        state_log: Callable[[Path, EntrySource], StateLog] = StateLog,
        journal: Callable[[Path], Journal] = Journal,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_folder = run_folder
        self.values = KeyValue(self._save_entry)
        self._changed = changed
        self._workers: dict[str, Peer] = {}
        self._agents: dict[str, Peer] = {}
        self._journal = journal(run_folder / "journal.jsonl")
        self._unwritten: list[dict[str, Any]] = []
        self._saved: machine.State | None = None
        self._entry_number = 0
        self._unsaved_rows: dict[str, set[str]] = {}
        self._clock = clock
        self._state_log = state_log(run_folder / STATE_LOG, self._entries)
        self._started_at, self._time_before = clock(), 0.0
        self.state = machine.State(settings)
        try:
            self._restore(fresh)
            self._state_log.rewrite()
            self._saved = self.state
        except (JobError, OSError) as error:
            self._state_log.close()
            raise JobError(f"{STATE_LOG} cannot be used: {error}") from error

    @property
    def connections(self) -> int:
        """The number of workers and agents that are connected."""
        return len(self._workers) + len(self._agents)

    def now(self) -> float:
        """The job's time in seconds: it stands still while no coordinator runs."""
        return self._time_before + self._clock() - self._started_at

    def next_deadline(self) -> float | None:
        """The time at which :meth:`tick` is needed; None while there is no deadline."""
        deadlines = (machine.next_deadline(self.state), self.values.deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self) -> None:
        """Act on deadlines that have come."""
        self._answer(self.values.expire(self.now()))
        self.handle(machine.Tick())

    def handle(self, event: machine.Event) -> None:
        """Apply an event: decide, save, act. In this order, so that no action is done that a restart would forget."""
        is_sent_again = _is_sent_again(self.state, event)
        self.state, actions = machine.step(self.state, event, self.now())
        notes = (action for action in actions if isinstance(action, machine.WriteJournal))
        self._unwritten = [self._journal.line(note.event, note.fields) for note in notes]
        for action in actions:
            if isinstance(action, machine.SaveRows):
                for table, ids in action.rows.items():
                    self._unsaved_rows.setdefault(table, set()).update(ids)
        if self._unwritten or not is_sent_again:
            self._save_state()
        if self._unwritten:
            self._journal.append(self._unwritten)
            self._unwritten = []
        texts: dict[int, str] = {}  # so that a message to many workers is written as JSON once
        for action in actions:
            self._do(action, texts)
        self._changed()

    def status(self) -> dict[str, Any]:
        """The status of the job, its workers and its agents, for people and programs."""
        return machine.status(self.state)

    def store(self, worker: str, request: messages.StoreRequest) -> None:
        """Serve a request to the key-value store, unless its worker takes part no more: it will be told so."""
        if not machine.takes_part(self.state, worker):
            return
        if request.operation == "clock":
            self._answer([(worker, messages.StoreReply(id=request.id, value=str(round(self._clock() * 1e9))))])
            return
        self._answer(self.values.handle(worker, request, self.now()))
        self._changed()

    def worker_connected(self, worker: str, peer: Peer, hello: messages.WorkerHello) -> None:
        """Take a worker's new connection. An older one of the same worker has broken unnoticed, and is closed."""
        if (replaced := self._workers.get(worker)) is not None:
            replaced.hang_up()
            self.values.drop(worker)
        self._workers[worker] = peer
        self.handle(machine.WorkerMessage((worker,), hello))

    def agent_connected(self, agent: str, peer: Peer, hello: AgentHello) -> None:
        """Take an agent's new connection, in place of an older one."""
        if (replaced := self._agents.get(agent)) is not None:
            replaced.hang_up()
        self._agents[agent] = peer
        self.handle(machine.AgentMessage(agent, hello))

    def worker_disconnected(self, worker: str, peer: Peer) -> None:
        """Handle the end of a worker's connection; it counts only if there is no newer one."""
        if self._workers.get(worker) is peer:
            del self._workers[worker]
            self.values.drop(worker)
            self.handle(machine.Disconnected(worker=worker))

    def agent_disconnected(self, agent: str, peer: Peer) -> None:
        """Handle the end of an agent's connection; it counts only if there is no newer one."""
        if self._agents.get(agent) is peer:
            del self._agents[agent]
            self.handle(machine.Disconnected(agent=agent))

    def close(self) -> None:
        """Let another coordinator take over."""
        self._state_log.close()

    # -- actions

    def _do(self, action: machine.Action, texts: dict[int, str]) -> None:
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
            return  # it is sent what it has missed when it connects again
        if id(message) not in texts:
            texts[id(message)] = message.model_dump_json()
        peer.send(texts[id(message)])

    def _answer(self, answers: Iterable[Answer]) -> None:
        for worker, reply in answers:
            if (peer := self._workers.get(worker)) is not None:
                peer.send(reply.model_dump_json())

    # -- saving

    def _save_entry(self, entry: Mapping[str, Any]) -> None:
        self._state_log.append(entry)

    def _save_state(self) -> None:
        """Save the changes since the last save; the whole state if there was none, or if it failed."""
        self._entry_number += 1
        if self._saved is None:
            entry = self._full_entry()
        else:
            entry = self._entry_with({"changes": plain_changes(self._saved, self.state, self._unsaved_rows)})
        saved = self._state_log.append(entry, durable=bool(self._unwritten))
        self._saved = self.state if saved else None
        self._unsaved_rows.clear()

    def _entries(self) -> Iterator[Mapping[str, Any]]:
        yield self._full_entry()
        yield from self.values.entries()

    def _full_entry(self) -> dict[str, Any]:
        return self._entry_with({"state": plain_state(self.state)})

    def _entry_with(self, content: dict[str, Any]) -> dict[str, Any]:
        # The journal's lines are saved with the decision: a coordinator that is killed before it writes them into the
        # journal completes the journal when it starts again.
        return {"entry": self._entry_number, "now": self.now(), **content, "journal": self._unwritten}

    def _restore(self, fresh: bool) -> None:
        plain: dict[str, Any] | None = None
        newest: dict[str, Any] = {}
        for entry in self._state_log.read():
            if isinstance(entry.get("state"), dict):
                plain, newest = entry["state"], entry
            elif plain is not None and isinstance(entry.get("changes"), dict):
                if fresh:
                    plain |= {name: entry["changes"][name] for name in LASTING if name in entry["changes"]}
                elif _number(entry) != _number(newest) + 1:
                    raise JobError("lines of it are missing; remove it to begin anew")
                else:
                    merge(plain, entry["changes"])
                newest = entry
            elif not fresh:
                self.values.restore(entry)
        if plain is None:
            return
        if fresh:
            numbers: dict[str, Any] = {name: plain.get(name) for name in LASTING}
            if all(type(number) is int and 0 <= number < 2**62 for number in numbers.values()):
                self.state = replace(self.state, **numbers)
            return
        self.state = state_of(plain)
        try:
            self._time_before = _NOW.validate_python(newest.get("now"))
            lines = _LINES.validate_python(newest.get("journal", []))
        except ValidationError as error:
            raise JobError("another version of Unisono wrote it; remove it to begin anew") from error
        self._journal.complete(lines)
        self.handle(machine.Restarted())


def _number(entry: Mapping[str, Any]) -> int:
    """The number of an entry of the state log; for an entry without one, a number that no entry follows."""
    number = entry.get("entry")
    return number if type(number) is int else -2


def _is_sent_again(state: machine.State, event: machine.Event) -> bool:
    """Whether an event need not be saved: after a restart its sender sends it again, or it happens again.

    A worker's first hello is saved: the answer, whether the worker joins, decides how the worker goes on.
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

    Invalid input ends the connection with :class:`~unisono.membership.messages.Refused`, and changes nothing else.
    """

    MESSAGES: ClassVar[TypeAdapter[Any]]
    """The type of the messages that it receives."""

    def __init__(self, coordinator: Coordinator, peer: Peer) -> None:
        self._coordinator = coordinator
        self._peer = peer
        self._sender = ""
        self._is_over = False

    def receive(self, data: str | bytes) -> None:
        """Handle a text that came over the connection."""
        if self._is_over:
            return
        try:
            self._parse(data)
        except Unreadable as error:
            self.refuse(str(error))

    def refuse(self, reason: str) -> None:
        """Close the connection, with the reason."""
        self._is_over = True
        self._peer.send(messages.Refused(reason=reason).model_dump_json())
        self._peer.hang_up()

    def close(self) -> None:
        """Handle the end of the connection."""
        self._is_over = True
        if self._sender:
            self._disconnected()

    def _parse(self, data: str | bytes) -> None:
        message = parse(self.MESSAGES, data)
        if isinstance(message, messages.WorkerHello | AgentHello) == bool(self._sender):
            raise Unreadable("a connection begins with a hello, and has no other")
        if not self._sender and message.protocol != messages.PROTOCOL:
            raise Unreadable(
                f"this coordinator speaks version {messages.PROTOCOL}, not {message.protocol}: install one version "
                f"everywhere"
            )
        self._handle(message)

    def _handle(self, message: Any) -> None:
        raise NotImplementedError

    def _disconnected(self) -> None:
        raise NotImplementedError


class WorkerSession(Session):
    """A worker's connection."""

    MESSAGES = messages.from_worker

    def _handle(self, message: messages.FromWorker) -> None:
        if isinstance(message, messages.WorkerHello):
            self._sender = message.worker
            self._coordinator.worker_connected(self._sender, self._peer, message)
        elif isinstance(message, messages.StoreRequest):
            self._coordinator.store(self._sender, message)
        else:
            self._coordinator.handle(machine.WorkerMessage((self._sender,), message))

    def _disconnected(self) -> None:
        self._coordinator.worker_disconnected(self._sender, self._peer)


class AgentSession(Session):
    """An agent's connection."""

    MESSAGES = messages.from_agent

    def _handle(self, message: messages.FromAgent) -> None:
        if isinstance(message, AgentHello):
            self._sender = message.agent
            self._coordinator.agent_connected(self._sender, self._peer, message)
        else:
            self._coordinator.handle(machine.AgentMessage(self._sender, message))

    def _disconnected(self) -> None:
        self._coordinator.agent_disconnected(self._sender, self._peer)
