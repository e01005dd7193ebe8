"""What the coordinator has to do, once the state is where it outlasts the coordinator."""

from dataclasses import dataclass
from typing import Any

from unisono.membership.messages import ToAgent, ToWorker


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a worker, if it is connected."""

    worker: str
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


Action = Tell | TellAgent | Hangup | Note | Forget
