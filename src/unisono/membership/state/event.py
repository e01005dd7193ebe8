"""What happens to the coordinator's state."""

from dataclasses import dataclass

from unisono.membership.messages import FromAgent, FromWorker


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker has said something. Its hello is what connects it."""

    worker: str
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
class StopAsked:
    """Somebody asks the whole job to stop, to go on later."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The coordinator has started again from this state: nobody is connected yet, and clocks begin anew."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Heard | AgentHeard | Disconnected | Resized | LeaveAsked | StopAsked | Restarted | Tick
