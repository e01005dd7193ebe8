"""The boundary between two steps of a loop, where all workers have the same state."""

from __future__ import annotations

from unisono.train.group.collectives import CollectiveCalls
from unisono.train.recovery.integrity import Integrity
from unisono.train.recovery.recovery import Recovery, Snapshots
from unisono.train.recovery.verification import Verification
from unisono.train.state.trained import RunProgress
from unisono.train.step.current import CurrentSteps
from unisono.train.step.run_base import RunBase


class Boundary:
    """Verifies and writes the state when that is due, goes back if it is wrong, and lets workers join and leave."""

    def __init__(
        self,
        run: RunBase,
        collectives: CollectiveCalls,
        steps: CurrentSteps,
        integrity: Integrity,
        verification: Verification,
        recovery: Recovery,
        snapshots: Snapshots,
    ) -> None:
        self.trained, self.checkpoints, self.requests = run.trained, run.checkpoints, run.requests
        self.collectives, self.steps, self.integrity, self.verification = collectives, steps, integrity, verification
        self.recovery, self.snapshots = recovery, snapshots

    def reached(self, *, is_end: bool) -> RunProgress:
        """Do what is due at a boundary. All workers are here, and have the same state unless a round is open.

        ``is_end`` says that the loop ends here. Return the progress from which the run goes on: the present one, unless
        the run has gone back.
        """
        if not self.trained.is_doubted and not self.steps.computer.is_open:
            self._keep_state(is_end=is_end)
        self.requests.compare &= self.steps.computer.is_open
        if is_back := self.trained.is_doubted:
            self.verification.go_back()
        if self.requests.regroup and (is_back or not is_end) and not self.steps.computer.is_open:
            self.collectives.regroup(None, at_boundary=True)
        return self.trained.progress

    def cut_short(self) -> None:
        """End a loop before its end. Called after :meth:`reached`."""
        if not self.steps.computer.is_open:
            self.snapshots.save_cut(self.integrity.known.agreed(self.trained.progress.position.step))

    def _keep_state(self, *, is_end: bool) -> None:
        step = self.trained.progress.position.step
        self.checkpoints.requested |= self.requests.checkpoint
        is_due = self.requests.compare or self.integrity.due(step) or self.checkpoints.due(step)
        verified = self.verification.verify() if is_due or is_end else None
        if is_end:
            return
        if self.requests.leave and not self.trained.is_doubted:
            self.recovery.depart_together(verified)
        self.snapshots.save_if_due(verified)
        self.requests.checkpoint = False
