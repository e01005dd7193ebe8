"""When workers with weights of their own get the same ones again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.adapt.view import Timings
from unisono.errors import JobMismatch
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.membership import Membership
from unisono.train.state.checkpoints import Checkpoints
from unisono.train.state.ending import Ending, Requests
from unisono.train.state.trained import Trained
from unisono.train.step.computer import Told
from unisono.train.step.current import CurrentSteps
from unisono.train.step.listeners import Listeners
from unisono.train.step.step import Step
from unisono.train.step.worker_report import WorkerReport


class Synchronisation:
    """Synchronises workers when the strategy says so, and before every collective call of the script.

    Under a strategy with which all workers always have the same weights, there is nothing to do.

    Args:
        collectives: the collective calls.
        steps: the present step computer.
        trained: the state of the run.
        membership: the members of the job.
        checkpoints: the checkpoints of the run, of which one may be due.
        requests: the workers' agreement on what to do at the next boundary.
        report: this worker's part of what all workers tell each other.
        listeners: the run's listeners.
        ending: the end of the run on this worker.
    """

    def __init__(
        self,
        collectives: CollectiveCalls,
        steps: CurrentSteps,
        trained: Trained,
        membership: Membership,
        checkpoints: Checkpoints,
        requests: Requests,
        report: WorkerReport,
        listeners: Listeners,
        ending: Ending,
    ) -> None:
        self._collectives, self._steps, self._trained, self._membership = collectives, steps, trained, membership
        self._checkpoints, self._requests, self._report = checkpoints, requests, report
        self._listeners, self._ending = listeners, ending

    def before_call(self) -> None:
        """A collective call follows, for which all workers need to hold the same weights.

        Whoever joins makes none, but hears of it from the others.

        Raises:
            JobError: the run is over.
            JobMismatch: the script has left the loop in which the run was about to go back to an older state.
        """
        self._ending.require_open()
        if self._membership.joins:
            return
        doubt = self._trained.doubt
        if doubt is not None and self._steps.under_way is None:
            raise JobMismatch(
                f"{doubt.why}, and the script has left the loop before the steps since then could be computed again: "
                f"start the job again, it goes on from its newest verified checkpoint"
            )
        self._synchronise()

    def step_ends(self, step: Step) -> bool:
        """A step is over on this worker.

        Returns:
            whether all workers have the same weights after it.
        """
        is_due = self._requests.leave or self._requests.regroup or self._checkpoints.due(step.number + 1)
        ends = self._steps.computer.step_ends(step, self._collectives, is_due=is_due)
        if ends:
            self._synchronise()
        return ends

    def _synchronise(self) -> None:
        if not self._steps.is_open:
            return
        step = self._trained.progress.position.step
        told = self._steps.computer.synchronise(step, self._told, self._heard, self._collectives)
        if any(one["samples"] for one in told):
            strategy = str(self._steps.strategy)
            self._listeners.tell(lambda one: one.round_ended(told, strategy))

    def _told(self) -> Mapping[str, Any]:
        return self._report.told(self._collectives.formed_s)

    def _heard(self, told: Told) -> None:
        """What every worker says. In the change with which they synchronise."""
        self._requests.note(leave=any(one["leave"] for one in told), regroup=any(one["regroup"] for one in told))
        setting = self._trained.setting(self._membership.workers)
        self._trained.monitors.time(setting, [Timings(*one["timings"]) for one in told])
