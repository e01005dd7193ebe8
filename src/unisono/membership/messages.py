"""The messages of workers and agents to and from the coordinator: frozen, validated values, as JSON on the wire."""

import re
from itertools import accumulate
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from unisono.errors import Unreadable

PROTOCOL = 4
"""The version of the messages, which must be the same at both ends of a connection."""

MOST_WORKERS = 65536
MOST_DEVICES = 32
"""The most devices of a worker: the addresses of all of them are one text."""

LONGEST_NAME = 128
LARGEST_VALUE = 4 * 2**20
"""The most characters of a value in the store, and nearly those of a message."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_NAME, pattern=r"\A[A-Za-z0-9._:-]+\z")]
Text = Annotated[str, StringConstraints(max_length=4096)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Value = Annotated[str, StringConstraints(max_length=LARGEST_VALUE)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Unreached(Message):
    """A host to which no connection can be made."""

    agent: Name
    why: Text


class Target(Message):
    """A host that is to be probed.

    Attributes:
        address: the address at which the agent answers probes.
    """

    agent: Name
    host: Text
    address: Text


# -- from a worker -----------------------------------------------------------------------------------------------------


class WorkerHello(Message):
    """The first message on a worker's connection, also on a new one after the coordinator was gone.

    Attributes:
        worker: its id, which the coordinator gave to the agent that started it.
        shards: its job's number of shards: the most workers that can take part.
        devices: the number of its devices, which is the same for all workers of a job.
        generation: the number of its generation; 0 if it is in none.
    """

    kind: Literal["worker"] = "worker"
    protocol: Count = PROTOCOL
    worker: Name
    host: Name
    pid: Count
    shards: Annotated[int, Field(ge=1, le=65536)]
    devices: Annotated[int, Field(ge=1, le=MOST_DEVICES)] = 1
    generation: Count = 0


class Ready(Message):
    """This worker can be taken in.

    Attributes:
        loop: the number of the loop at whose start it waits, from 0 in the script; None before the first generation,
            where it waits in ``unisono.init``.
        address: the address at which its peers reach it, for the transport alone; with several devices one for each,
            with commas between.
        generation: the newest generation that it was part of; 0 if none. A joiner that was taken in, and has lost the
            others before it had their state, leaves that generation by being ready again.
        unreached: hosts of that generation that it could not connect to.
    """

    kind: Literal["ready"] = "ready"
    loop: Count | None = None
    address: Text = ""
    generation: Count = 0
    unreached: tuple[Unreached, ...] = Field(default=(), max_length=4096)


class Arrived(Message):
    """A member has left its generation's work and waits for the next generation.

    Attributes:
        acts: the number of collective calls (steps, evaluations …) that it has completed. Members differ by one at
            most.
        at_boundary: whether it stands between two steps of that loop, where joiners can enter.
        step: the number of its last committed step, for people.
        address: the address at which its peers reach it, for the transport alone; with several devices one for each,
            with commas between.
        unreached: hosts of the generation that it could not connect to, so that it did not form.
    """

    kind: Literal["arrived"] = "arrived"
    generation: Count
    acts: Count
    loop: Count
    at_boundary: bool
    step: Count
    address: Text = ""
    unreached: tuple[Unreached, ...] = Field(default=(), max_length=4096)


class Formed(Message):
    """A member works in its new generation.

    Attributes:
        seconds: the seconds that forming took, by part: ``detect``, ``regroup``, ``form``, ``copy``.
    """

    kind: Literal["formed"] = "formed"
    generation: Count
    seconds: dict[Name, Seconds] = Field(default_factory=dict, max_length=16)


class Leaving(Message):
    """This worker was asked to leave, by a signal, and will leave at the next boundary."""

    kind: Literal["leaving"] = "leaving"


class Pulse(Message):
    """The state of a worker's main thread, by its own measure.

    Attributes:
        doing: the worker's present activity: a collective call (a step, an evaluation …), waiting for other workers,
            or the script's own work between calls.
        still_s: the seconds since the last sign of progress.
        longest_s: the longest time between two signs of progress so far, in seconds.
        shard_s: the recent seconds per shard; 0 if shards are not to be split by speed.
    """

    doing: Literal["call", "wait", "script"] = "script"
    still_s: Seconds = 0.0
    longest_s: Seconds = 0.0
    shard_s: Seconds = 0.0


class Progress(Message):
    """A sign of life, every second or so.

    Attributes:
        acts: the number of collective calls, as in :class:`Arrived`.
        step: the number of its last committed step.
        samples_per_s: the whole job's recent samples per second.
        loop: the number of the loop that it is in, if it says so. No generation has to end for joiners that wait at an
            earlier loop.
        pulse: the pulse of its main thread. Another thread sends this message.
    """

    kind: Literal["progress"] = "progress"
    acts: Count
    step: Count
    samples_per_s: Seconds = 0.0
    loop: Count | None = None
    pulse: Pulse = Pulse()


class Finished(Message):
    """This worker's script has finished its run; with it, the job is done."""

    kind: Literal["finished"] = "finished"
    digest: Name


class ResizeRequest(Message):
    """The script or a policy asks for another number of workers."""

    kind: Literal["resize"] = "resize"
    workers: Annotated[int, Field(ge=1, le=65536)]


class Replace(Message):
    """A policy wants another worker instead of one that is too slow."""

    kind: Literal["replace"] = "replace"
    generation: Count
    rank: Count


class StoreRequest(Message):
    """One operation of the key-value store over which process groups form.

    Keys that begin with ``run/`` are kept for the whole job, also over the coordinator's end; all others only as long
    as the generations that use them.

    Attributes:
        id: a number that the reply repeats.
        operation: ``set``; ``get`` (waits for the key); ``wait`` (for all keys); ``add`` (an integer);
            ``compare_set``; ``delete``; ``check`` (whether all keys are there); ``clock`` (the coordinator's clock, for
            which the key says nothing).
        keys: one key; several for ``wait`` and ``check``.
        value: the value, as base64; for ``add`` a decimal number.
        expected: the expected value for ``compare_set``, as base64.
        timeout_s: the longest wait of ``get`` and ``wait``, in seconds.
    """

    kind: Literal["store"] = "store"
    id: Count
    operation: Literal["set", "get", "wait", "add", "compare_set", "delete", "check", "clock"]
    keys: tuple[Key, ...] = Field(min_length=1, max_length=4096)
    value: Value = ""
    expected: Value = ""
    timeout_s: Seconds = 0.0


# -- to a worker -------------------------------------------------------------------------------------------------------


class Welcome(Message):
    """The answer to a hello.

    Attributes:
        joins: whether training is under way, so that it has to catch up with its script before it is :class:`Ready`.
    """

    kind: Literal["welcome"] = "welcome"
    joins: bool


class RegroupDue(Message):
    """A new generation is due: members arrive at the next boundary that they agree on.

    Attributes:
        generation: the number of the generation that is going to end.
    """

    kind: Literal["regroup"] = "regroup"
    generation: Count


class CheckpointDue(Message):
    """A person asks for a checkpoint. It is sent to the main worker, which tells the others in its next step."""

    kind: Literal["checkpoint"] = "checkpoint"


class Lost(Message):
    """The generation's work cannot go on: members that wait for others stop waiting, and arrive.

    Attributes:
        generation: the number of the generation.
        workers: its members that are gone; none if a member has left the work in the middle, and tries again.
    """

    kind: Literal["lost"] = "lost"
    generation: Count
    workers: tuple[Name, ...] = ()


class Ranks(Message):
    """Workers of consecutive ranks that are alike.

    Attributes:
        shards: the number of shards that each of them computes.
        acts: the number of collective calls that each has completed; 0 for joiners.
    """

    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)]
    shards: Annotated[int, Field(ge=0, le=65536)]
    acts: Count = 0
    joins: bool = False


class Neighbour(Message):
    """A worker of the same host.

    Attributes:
        address: the address at which workers of its host reach it; with several devices one for each.
    """

    rank: Count
    worker: Name
    address: Text = ""


class NewGeneration(Message):
    """A new generation: the part of it that a worker needs.

    Attributes:
        ranks: all of its workers, in the order of ranks.
        here: the workers of this worker's host, itself included, in the order of ranks.
        hosts: other hosts that this worker probes while the generation forms; one worker of each host probes.
        hosts_since: the generation since which these hosts are new; 0 if all hosts are named.
        gone: the agents of hosts that were in that generation, and are not in this one.
        source: the rank whose state is the newest; workers that are behind take that state.
        loop: the number of the loop that its members are in; None before the first.
        departures: members that were lost or left on notice so far, in the whole job.
    """

    kind: Literal["minted"] = "minted"
    generation: Count
    ranks: tuple[Ranks, ...] = Field(min_length=1, max_length=MOST_WORKERS)
    here: tuple[Neighbour, ...] = Field(default=(), max_length=MOST_WORKERS)
    hosts: tuple[Target, ...] = Field(default=(), max_length=MOST_WORKERS)
    hosts_since: Count = 0
    gone: tuple[Name, ...] = Field(default=(), max_length=MOST_WORKERS)
    source: Count
    loop: Count | None = None
    departures: Count = 0

    @model_validator(mode="after")
    def _names_ranks_that_are_there(self) -> Self:
        workers = sum(ranks.workers for ranks in self.ranks)
        if workers > MOST_WORKERS or max((self.source, *(neighbour.rank for neighbour in self.here))) >= workers:
            raise ValueError(f"{workers} workers: too many, or fewer than a rank that is named")
        return self

    @property
    def bounds(self) -> tuple[int, ...]:
        """The shards of each worker: rank r computes those from ``bounds[r]`` to ``bounds[r + 1]``."""
        return (0, *accumulate(ranks.shards for ranks in self.ranks for _ in range(ranks.workers)))

    @property
    def acts(self) -> list[int]:
        """The number of collective calls that each rank has completed."""
        return [ranks.acts for ranks in self.ranks for _ in range(ranks.workers)]

    @property
    def joiners(self) -> frozenset[int]:
        """The ranks that are new."""
        joins = (ranks.joins for ranks in self.ranks for _ in range(ranks.workers))
        return frozenset(rank for rank, is_new in enumerate(joins) if is_new)


class Removed(Message):
    """This worker takes part no more, and has to end.

    Attributes:
        preempted: whether the job is to go on later: the last members to leave write a checkpoint.
    """

    kind: Literal["removed"] = "removed"
    reason: Text
    preempted: bool = False


class Refused(Message):
    """The answer to a message that cannot be served; the connection is closed."""

    kind: Literal["refused"] = "refused"
    reason: Text


class JobOver(Message):
    """The job is done, has failed, or was preempted.

    Attributes:
        digest: the weights' digest; empty if the job is not done, or no worker has trained.
        main: the worker of rank 0, if the job is done. The worker may be gone by now.
        main_agent: the agent that runs that worker, or did.
        finished: the workers that have the complete result, if the job is done.
        agents: the agents that run these workers.
        worker: the worker whose script has ended the job, if the job failed because of it.
        preempted: whether the job is to go on later; also for an agent that leaves a job that goes on without it.
    """

    kind: Literal["over"] = "over"
    digest: str = ""
    main: str = ""
    main_agent: str = ""
    finished: tuple[Name, ...] = ()
    agents: tuple[Name, ...] = ()
    worker: str = ""
    reason: Text = ""
    preempted: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the job is done: it was trained to its end, or all scripts ended without an error before training."""
        return bool(self.digest or self.finished)


class StoreReply(Message):
    """The answer to a :class:`StoreRequest`.

    Attributes:
        value: the value, as base64; a decimal number for ``add``, and nanoseconds for ``clock``; ``1`` or ``0`` for
            ``check`` and ``delete``.
        error: an error message for people; empty if the request succeeded.
    """

    kind: Literal["stored"] = "stored"
    id: Count
    value: Value = ""
    error: Text = ""


FromWorker = Annotated[
    WorkerHello | Ready | Arrived | Formed | Leaving | Progress | Finished | ResizeRequest | Replace | StoreRequest,
    Field(discriminator="kind"),
]
ToWorker = Annotated[
    Welcome | RegroupDue | CheckpointDue | Lost | NewGeneration | Removed | Refused | JobOver | StoreReply,
    Field(discriminator="kind"),
]

from_worker: TypeAdapter[FromWorker] = TypeAdapter(FromWorker)
to_worker: TypeAdapter[ToWorker] = TypeAdapter(ToWorker)


# -- from and to an agent ----------------------------------------------------------------------------------------------


class AgentHello(Message):
    """The first message on an agent's connection.

    Attributes:
        agent: its id: a random one, or that of its place, which a later agent at this place has, too.
        workers: the number of workers that it can run; 0 for an agent that only keeps the coordinator running.
        running: the ids of the workers that it was told to start, and whose end it has not reported, on a new
            connection after the coordinator was gone.
        probes: the address at which it answers probes of other hosts; empty if it answers none.
    """

    kind: Literal["agent"] = "agent"
    protocol: Count = PROTOCOL
    agent: Name
    host: Name
    workers: Annotated[int, Field(ge=0, le=4096)]
    running: tuple[Name, ...] = Field(default=(), max_length=4096)
    probes: Text = ""


class WorkerEnded(Message):
    """A worker's process has ended.

    Attributes:
        code: its exit code; negative for a signal.
        error: the reason that the worker itself has recorded; empty if it has recorded none.
    """

    kind: Literal["ended"] = "ended"
    worker: Name
    code: int = Field(ge=-4096, le=4096)
    error: Text = ""


class AgentLeaving(Message):
    """This agent was asked to leave with all of its workers; from an agent without room: the whole job was.

    Attributes:
        reason: the notice that the machine is taken away, for people; empty if a person or a batch system has asked.
    """

    kind: Literal["agent_leaving"] = "agent_leaving"
    reason: Text = ""


class Probed(Message):
    """The result of a :class:`Probe`: the agents whose hosts and this one reach each other, and the others."""

    kind: Literal["probed"] = "probed"
    reached: tuple[Name, ...] = Field(default=(), max_length=4096)
    unreached: tuple[Unreached, ...] = Field(default=(), max_length=4096)


class Start(Message):
    """Start these workers, whose ids were never used before; after failures, with a delay."""

    kind: Literal["start"] = "start"
    workers: tuple[Name, ...] = Field(min_length=1, max_length=4096)
    delay_s: Seconds = 0.0


class End(Message):
    """End these workers.

    Attributes:
        how: ``leave`` sends SIGTERM; ``kill`` lets them write their stacks into their logs, and kills them; ``drop``
            kills workers that the job does not need any more.
    """

    kind: Literal["end"] = "end"
    workers: tuple[Name, ...] = Field(min_length=1, max_length=4096)
    how: Literal["leave", "kill", "drop"]


class Probe(Message):
    """Find out whether connections can be made to these hosts, and from them to this one."""

    kind: Literal["probe"] = "probe"
    targets: tuple[Target, ...] = Field(min_length=1, max_length=4096)


class LeftOut(Message):
    """Workers of this host are left out, since they and others could not connect; with an empty reason, no longer."""

    kind: Literal["left_out"] = "left_out"
    reason: Text = ""


class TurnedAway(Message):
    """Workers of this host have failed before they took part, and no others are started in their places.

    Attributes:
        reason: the reason for which the last of them failed, for people; empty if places are filled again.
        places: the number of workers that may still run there.
    """

    kind: Literal["turned_away"] = "turned_away"
    reason: Text = ""
    places: Count = 0


FromAgent = Annotated[AgentHello | WorkerEnded | AgentLeaving | Probed, Field(discriminator="kind")]
ToAgent = Annotated[
    Welcome | Start | End | Probe | LeftOut | TurnedAway | JobOver | Refused,
    Field(discriminator="kind"),
]

from_agent: TypeAdapter[FromAgent] = TypeAdapter(FromAgent)
to_agent: TypeAdapter[ToAgent] = TypeAdapter(ToAgent)


# -- from received bytes to messages, within limits that hold before anything is parsed -------------------------------

LONGEST_MESSAGE = LARGEST_VALUE + 2**16
"""The most bytes of a message: the largest value, and the text around it."""

DEEPEST = 8
"""The most lists and objects inside each other."""

MOST_PARTS = 20_000
"""The most names, texts, brackets and commas of a message."""

_LONG_NUMBER = 300  # digits; to convert very long ones takes quadratic time
_PARTS = re.compile(rf'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{{}},]|[0-9]{{{_LONG_NUMBER}}}', re.DOTALL)

M = TypeVar("M")


def parse(adapter: TypeAdapter[M], data: str | bytes) -> M:
    """A message, or another validated value, from its JSON text. The error does not repeat the text.

    Raises:
        Unreadable: the text is too long, nested too deep, has too many parts, or is no such value.
    """
    if len(data) > LONGEST_MESSAGE:
        raise Unreadable(f"a message has at most {LONGEST_MESSAGE} bytes")
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError as error:
        raise Unreadable("a message is UTF-8 text") from error
    _check_shape(text)
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise Unreadable(_first(error)) from error


def _check_shape(text: str) -> None:
    if len(text) < _LONG_NUMBER and text.count("[") + text.count("{") <= DEEPEST:
        return  # nearly all messages are so short and flat that they cannot exceed a limit
    depth = 0
    for number, part in enumerate(_PARTS.finditer(text)):
        if number >= MOST_PARTS:
            raise Unreadable(f"a message has at most {MOST_PARTS} parts")
        match part[0][0]:
            case "[" | "{":
                depth += 1
                if depth > DEEPEST:
                    raise Unreadable(f"a message is nested at most {DEEPEST} deep")
            case "]" | "}":
                depth -= 1
            case '"' | ",":
                pass
            case _:
                raise Unreadable(f"a number has fewer than {_LONG_NUMBER} digits")


def _first(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in details["loc"])
    return f"{where}: {details['msg']}"[:200] if where else details["msg"][:200]
