"""The base of a run: what exists before anything computes, and what most parts of a run have to do with."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.checkpoint.folder import RunFolder
from unisono.spans import Spans
from unisono.train.config.run_config import RunConfig
from unisono.train.group.membership import Membership
from unisono.train.state.checkpoints import RunCheckpoints
from unisono.train.state.ending import Ending, LeaveRequest, Requests
from unisono.train.state.trained import Trained
from unisono.train.step.listeners import Listeners


@dataclass(frozen=True, eq=False)
class RunBase:
    """The state of a run, who takes part in it, and who listens.

    Attributes:
        config: the configuration of the run.
        membership: the members of the job.
        folder: the run folder.
        checkpoints: the checkpoints of the run.
        leave: the request to this worker to leave, once there is one.
        spans: this worker's spans; None if they are not kept.
        trained: the state of the run: models, optimizers, position.
        ending: the end of the run on this worker.
        requests: the workers' agreement on what to do at the next boundary.
        listeners: the run's listeners.
    """

    config: RunConfig
    membership: Membership
    folder: RunFolder
    checkpoints: RunCheckpoints
    leave: LeaveRequest
    spans: Spans | None
    trained: Trained
    ending: Ending
    requests: Requests
    listeners: Listeners
