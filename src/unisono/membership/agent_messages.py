"""The messages between agents and the coordinator."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from unisono.membership import messages


class AgentHello(messages.Message):
    """The first message on an agent's connection.

    Attributes:
        agent: its id: made up at random when it started, or that of a place, which its successor there has, too.
        workers: the number of workers that it can run; 0 for one that only keeps the coordinator.
        running: the ids of those that it was told to start and whose end it has not told yet, on a new connection
            after the coordinator was gone.
        probes: the address at which it answers probes of other hosts; empty if it does not.
    """

    kind: Literal["agent"] = "agent"
    protocol: messages.Count = messages.PROTOCOL
    agent: messages.Name
    host: messages.Name
    workers: Annotated[int, Field(ge=0, le=4096)]
    running: tuple[messages.Name, ...] = Field(default=(), max_length=4096)
    probes: messages.Text = ""


class WorkerEnded(messages.Message):
    """A worker's process has ended.

    Attributes:
        code: its exit code; negative for a signal.
        error: the worker's own account of why it ended, if it left one.
    """

    kind: Literal["ended"] = "ended"
    worker: messages.Name
    code: int = Field(ge=-4096, le=4096)
    error: messages.Text = ""


class AgentLeaving(messages.Message):
    """This agent was asked to leave, and all of its workers with it; by one without room, the whole job.

    Attributes:
        reason: the notice that the machine is taken away, for people; empty if a person or a batch system has asked.
    """

    kind: Literal["agent_leaving"] = "agent_leaving"
    reason: messages.Text = ""


class Probed(messages.Message):
    """The result of a :class:`Probe`.

    Attributes:
        reached: agents whose hosts and this one reach each other.
        unreached: the others.
    """

    kind: Literal["probed"] = "probed"
    reached: tuple[messages.Name, ...] = Field(default=(), max_length=4096)
    unreached: tuple[messages.Unreached, ...] = Field(default=(), max_length=4096)


class Start(messages.Message):
    """Start these workers.

    Attributes:
        workers: new ids, never used before.
        delay_s: the seconds to wait before the start, after failures.
    """

    kind: Literal["start"] = "start"
    workers: tuple[messages.Name, ...] = Field(min_length=1, max_length=4096)
    delay_s: messages.Seconds = 0.0


class End(messages.Message):
    """End these workers.

    Attributes:
        workers: their ids.
        how: ``leave`` sends SIGTERM; ``kill`` lets them write their stacks into their logs, and kills them; ``drop``
            kills those that nobody needs.
    """

    kind: Literal["end"] = "end"
    workers: tuple[messages.Name, ...] = Field(min_length=1, max_length=4096)
    how: Literal["leave", "kill", "drop"]


class Probe(messages.Message):
    """Find out whether connections can be made to these hosts, and from them to this one.

    Attributes:
        targets: the hosts.
    """

    kind: Literal["probe"] = "probe"
    targets: tuple[messages.Target, ...] = Field(min_length=1, max_length=4096)


class LeftOut(messages.Message):
    """Workers of this host take no part, since they and others could not connect.

    Attributes:
        reason: the reason, for people; empty if they can take part again.
    """

    kind: Literal["left_out"] = "left_out"
    reason: messages.Text = ""


class TurnedAway(messages.Message):
    """Workers of this host have failed before they took part, and no others are started in their places.

    Attributes:
        reason: the end of the last of them, for people; empty if places are filled again.
        places: the number of workers that may still run there.
    """

    kind: Literal["turned_away"] = "turned_away"
    reason: messages.Text = ""
    places: messages.Count = 0


FromAgent = Annotated[AgentHello | WorkerEnded | AgentLeaving | Probed, Field(discriminator="kind")]
ToAgent = Annotated[
    messages.Welcome | Start | End | Probe | LeftOut | TurnedAway | messages.JobOver | messages.Refused,
    Field(discriminator="kind"),
]

from_agent: TypeAdapter[FromAgent] = TypeAdapter(FromAgent)
to_agent: TypeAdapter[ToAgent] = TypeAdapter(ToAgent)
