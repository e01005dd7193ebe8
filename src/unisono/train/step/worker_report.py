"""What a worker has to say to the others in each step, or when they synchronise."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from unisono.train.group.control import Flags
from unisono.train.group.membership import Membership
from unisono.train.group.signals import LeaveRequest
from unisono.train.model.at_rest import Seen
from unisono.train.state.checkpoints import Checkpoints
from unisono.train.step.timer import Timer


class WorkerReport:
    """Asked for as late as can be: whoever wants in or out meanwhile need not wait for one step more.

    Args:
        membership: whether a new generation is due.
        leave: whether this worker was asked to leave.
        timer: how long its steps take.
        checkpoints: how long the newest one took.
    """

    def __init__(self, membership: Membership, leave: LeaveRequest, timer: Timer, checkpoints: Checkpoints) -> None:
        self._membership, self._leave, self._timer, self._checkpoints = membership, leave, timer, checkpoints

    def flags(self, formed_s: float, seen: Seen) -> Flags:
        """What rides with the control word.

        Args:
            formed_s: seconds that forming the present generation took.
            seen: what was found in the memory of this worker.
        """
        leaves = self._leave.requested and not self._membership.leave()
        return Flags(
            leaves,
            self._membership.is_due,
            flipped=seen.has_flipped,
            digest=seen.common,
            own=seen.own,
            timings=self._timer.timings(formed_s, self._checkpoints.seconds),
        )

    def told(self, formed_s: float) -> dict[str, Any]:
        """The same as JSON, where workers synchronise."""
        flags = self.flags(formed_s, Seen())
        return {"leave": flags.leave, "regroup": flags.regroup, "timings": astuple(flags.timings)}
