"""The decisions about membership: one state, and one function that takes it from event to event.

Nothing here knows sockets, clocks or chance. Times are arguments, in seconds from any start. What is told to somebody
who is not connected is lost; whoever connects again is told what follows from the state, so nothing has to be told
twice, and a coordinator that starts again from its last state goes on.
"""

from unisono.membership.state.event import (
    Action,
    AgentHeard,
    Bundle,
    Changed,
    CheckpointAsked,
    Disconnected,
    Event,
    Forget,
    Hangup,
    Heard,
    LeaveAsked,
    Note,
    ReplaceAsked,
    Resized,
    Restarted,
    StopAsked,
    Tell,
    TellAgent,
    Tick,
)
from unisono.membership.state.questions import (
    find,
    next_deadline,
    status,
    takes_part,
    why_no_checkpoint,
    why_not_replaced,
)
from unisono.membership.state.state import Agent, ElasticConfig, Signs, State, Worker
from unisono.membership.state.transitions import step

__all__ = [
    "step", "next_deadline", "find", "status", "takes_part", "why_no_checkpoint", "why_not_replaced",
    "State", "ElasticConfig", "Worker", "Agent", "Signs",
    "Event", "Heard", "AgentHeard", "Disconnected", "Resized", "LeaveAsked", "ReplaceAsked", "CheckpointAsked",
    "StopAsked", "Restarted", "Tick", "Bundle",
    "Action", "Tell", "TellAgent", "Hangup", "Note", "Forget", "Changed",
]  # fmt: skip
