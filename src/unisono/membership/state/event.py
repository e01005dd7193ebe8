"""The events that change the coordinator's state, and the actions that follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.membership.messages import FromAgent, FromWorker, ToAgent, ToWorker

# Actions: what the coordinator has to do once it has saved the state.


@dataclass(frozen=True, slots=True)
class SendToWorkers:
    """Send a message to those of these workers that are connected."""

    workers: tuple[str, ...]
    message: ToWorker


@dataclass(frozen=True, slots=True)
class SendToAgent:
    """Send a message to an agent, if it is connected."""

    agent: str
    message: ToAgent


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close a worker's connection after all messages to it were sent."""

    worker: str


@dataclass(frozen=True, slots=True)
class WriteJournal:
    """Write a line into the run's journal."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DropKeys:
    """Drop the store's keys of the generations below this number; with None all keys, since the job starts over."""

    below: int | None = None


@dataclass(frozen=True, slots=True)
class SaveRows:
    """Save the rows with these ids, by table: they are new, gone, or changed by more than signs of life."""

    rows: dict[str, frozenset[str]]


Action = SendToWorkers | SendToAgent | CloseConnection | WriteJournal | DropKeys | SaveRows


# Events: what changes the coordinator's state.


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A worker has sent a message, or several workers have sent the same. A hello connects its worker."""

    workers: tuple[str, ...]
    message: FromWorker


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """An agent has sent a message. A hello connects its agent."""

    agent: str
    message: FromAgent


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A worker or an agent has no connection any more. No event tells of one that a newer connection has replaced."""

    worker: str | None = None
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class ResizeRequested:
    """A person asks for another number of workers."""

    workers: int


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """A person asks a worker (by its id, or its rank in digits) or an agent (by its id) to leave."""

    who: str


@dataclass(frozen=True, slots=True)
class ReplaceRequested:
    """A person asks for a new worker in the place of another one, named by its id or its rank in digits."""

    who: str


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """A person asks for a checkpoint."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A person asks the whole job to stop, so that it can be continued later."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The coordinator has started again from this state: no worker or agent is connected yet, and clocks begin anew."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Several events at one moment: all are applied, in this order, before the rules look at the state."""

    events: Sequence[WorkerMessage | AgentMessage | Disconnected]


Requested = ResizeRequested | LeaveRequested | ReplaceRequested | CheckpointRequested | StopRequested
Event = WorkerMessage | AgentMessage | Disconnected | Requested | Restarted | Tick | Bundle
