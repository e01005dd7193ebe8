"""The decisions about membership: one state, and one function that takes it from event to event.

This package uses no sockets, clocks or random numbers. Times are arguments, in seconds from any start. A message to a
worker that is not connected is lost. When the worker connects again, it is sent what follows from the state: so no
message has to be kept, and a coordinator that starts again from its last state can go on.
"""

from unisono.membership.state.event import (
    Action,
    AgentMessage,
    Bundle,
    CheckpointRequested,
    CloseConnection,
    Disconnected,
    DropKeys,
    Event,
    LeaveRequested,
    ReplaceRequested,
    ResizeRequested,
    Restarted,
    SaveRows,
    SendToAgent,
    SendToWorkers,
    StopRequested,
    Tick,
    WorkerMessage,
    WriteJournal,
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
    "Event", "WorkerMessage", "AgentMessage", "Disconnected", "ResizeRequested", "LeaveRequested", "ReplaceRequested",
    "CheckpointRequested", "StopRequested", "Restarted", "Tick", "Bundle",
    "Action", "SendToWorkers", "SendToAgent", "CloseConnection", "WriteJournal", "DropKeys", "SaveRows",
]  # fmt: skip
