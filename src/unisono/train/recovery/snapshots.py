"""The whole state: written down when it is due, and restored once the script has come to where it was written."""

from __future__ import annotations

from unisono.checkpoint.snapshot import Digests
from unisono.checkpoint.store import Snapshot
from unisono.train.state.checkpoints import Checkpoints
from unisono.train.state.trained import Trained
from unisono.train.step.current import CurrentSteps
from unisono.train.step.listeners import Listeners


class Snapshots:
    """Takes the state, and writes checkpoints of it.

    Args:
        trained: the state.
        checkpoints: of the run.
        steps: who computes, and knows whether the weights are whole.
        listeners: who is told.
    """

    def __init__(self, trained: Trained, checkpoints: Checkpoints, steps: CurrentSteps, listeners: Listeners) -> None:
        self._trained, self._checkpoints, self._steps, self._listeners = trained, checkpoints, steps, listeners

    def settle(self, *, is_end: bool = False) -> None:
        """Restore the rest of a checkpoint, once the script has come to where it was written."""
        at, loops = self._trained.progress, self._trained.loops
        is_there = loops > at.loop or (loops == at.loop and at.reading is None)
        if (is_there or is_end) and self._trained.settle():
            self._tell_of_scheduler()

    def take(self) -> Snapshot:
        """The state.

        Raises:
            WorkerLost: a worker was lost in the middle of an update, and the weights are half updated.
        """
        self.settle()
        self._tell_of_scheduler()
        self._steps.require_whole()
        return self._trained.capture()

    def save_if_due(self, verified: Digests | None) -> None:
        """Write a checkpoint, if one is due.

        Args:
            verified: digests on which all workers have agreed, if they have compared the state.
        """
        if self._trained.restored is not None:  # the script has not come to where the newest one was written
            self._checkpoints.requested = False
        elif self._checkpoints.due(self._trained.progress.position.step) and not self._trained.is_doubted:
            self._checkpoints.save(self.take(), verified)

    def save(self, verified: Digests | None) -> bool:
        """Write a checkpoint now, and wait for it.

        Returns:
            whether it is on disk.
        """
        return self._checkpoints.save(self.take(), verified, wait=True)

    def save_last(self, verified: Digests | None) -> None:
        """The run ends: write one if this run writes any, and finish what is being written."""
        if self._checkpoints.in_use:
            self._checkpoints.save(self.take(), verified)
        self._checkpoints.close()

    def _tell_of_scheduler(self) -> None:
        if (prepared := self._trained.prepared) is not None and not self._trained.registered:
            self._listeners.tell(lambda one: one.unregistered_scheduler(prepared))
