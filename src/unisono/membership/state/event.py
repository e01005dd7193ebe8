"""The events that change the coordinator's state, and the actions that follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.membership.messages import FromAgent, FromWorker, ToAgent, ToWorker

# What the coordinator has to do, once the state is where it outlasts the coordinator.


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to workers, as far as they are connected."""

    workers: tuple[str, ...]
    message: ToWorker


@dataclass(frozen=True, slots=True)
class TellAgent:
    """Send a message to an agent, if it is connected."""

    agent: str
    message: ToAgent


@dataclass(frozen=True, slots=True)
class Hangup:
    """End a worker's connection, after what it was told."""

    worker: str


@dataclass(frozen=True, slots=True)
class Note:
    """Write a line into the journal."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the store's keys of the generations before this one; with None all keys, for the job starts over."""

    below: int | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """Keep these rows, by the name of their table: they have come, gone, or changed by more than signs of life."""

    rows: dict[str, frozenset[str]]


Action = Tell | TellAgent | Hangup | Note | Forget | Changed


# What happens to the coordinator's state.


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker has said something, or several have said the same. Its hello is what connects it."""

    workers: tuple[str, ...]
    message: FromWorker


@dataclass(frozen=True, slots=True)
class AgentHeard:
    """An agent has said something. Its hello is what connects it."""

    agent: str
    message: FromAgent


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A worker or an agent has no connection any more; not told of one that a newer one has replaced."""

    worker: str | None = None
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class Resized:
    """Somebody asks for another number of workers."""

    workers: int


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """Somebody asks a worker (by its id, or its rank in digits) or an agent (by its id) to leave."""

    who: str


@dataclass(frozen=True, slots=True)
class ReplaceAsked:
    """Somebody asks for another worker in the place of one, named by its id or its rank in digits."""

    who: str


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """Somebody asks for a checkpoint."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody asks the whole job to stop, to go on later."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The coordinator has started again from this state: nobody is connected yet, and clocks begin anew."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Several events at one moment: all have their effects, in this order, before anything follows from them."""

    events: Sequence[Heard | AgentHeard | Disconnected]


Asked = Resized | LeaveAsked | ReplaceAsked | CheckpointAsked | StopAsked
Event = Heard | AgentHeard | Disconnected | Asked | Restarted | Tick | Bundle
