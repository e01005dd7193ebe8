"""The base of a run: the objects that exist before anything computes, and that most parts of a run use."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.checkpoint.folder import RunFolder
from unisono.spans import Spans
from unisono.train.config.run_config import RunConfig
from unisono.train.group.membership import Membership
from unisono.train.state.checkpoints import RunCheckpoints
from unisono.train.state.ending import Ending, LeaveRequest, Requests
from unisono.train.state.trained import Trained
from unisono.train.state.unnamed import UnnamedStates
from unisono.train.step.listeners import Listeners
from unisono.train.step.placement import Placement
from unisono.train.step.placements import placement_of


@dataclass(frozen=True, eq=False)
class RunBase:
    """The state of a run, its workers and its listeners. ``spans`` is None if they are not kept."""

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
    states: UnnamedStates

    @property
    def placement(self) -> Placement:
        """The placement of the model on the devices of this worker, in the present generation."""
        return placement_of(self.trained.require_prepared(), self.membership.workers)
