"""What a crowd of workers tells of the coordinator that it is connected to."""

from pydantic import BaseModel, Field


class Noticed(BaseModel):
    """What a crowd noticed since it told the last time; times are those of ``time.monotonic``, in seconds.

    Attributes:
        asked: the workers that the coordinator asked for.
        heard: of each new generation the number of members that heard of it, and the time at which the last did.
        delays: the times at which the store was asked, and the seconds until its answer.
        waiting: the number of answers still to come.
        received: the bytes of all messages so far.
        dialled: the number of connections that were tried so far, those of agents left out.
        torn: the times at which workers were lost.
        sent_away: the reasons of the coordinator to part with workers or agents.
    """

    asked: list[str] = Field(default_factory=list)
    heard: dict[int, tuple[int, float]] = Field(default_factory=dict)
    delays: list[tuple[float, float]] = Field(default_factory=list)
    waiting: int = 0
    received: int = 0
    dialled: int = 0
    torn: dict[str, float] = Field(default_factory=dict)
    sent_away: list[str] = Field(default_factory=list)
