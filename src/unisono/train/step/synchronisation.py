"""The report of a worker to the others, and the synchronisation of workers with weights of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import astuple
from statistics import median
from typing import Any

from unisono.adapt.view import Timings
from unisono.errors import JobMismatch
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.control import Flags
from unisono.train.model.at_rest import Seen
from unisono.train.step.current import CurrentSteps, Told
from unisono.train.step.listeners import Counted, Listener
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Call, Step

RECENT = 9
FEWEST = 3


class Timer(Listener):
    """Keeps the times of the step before until the next control word takes them along.

    The last in the list of listeners, so that it hears of the time that those before it have taken.
    """

    def __init__(self) -> None:
        self._shard_s = 0.0
        self._seconds: Mapping[str, float] = {}
        self._sent = 0, 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def step_computed(self, step: Step, shards: int, seconds: float) -> None:
        """This worker has computed so many shards."""
        self._shard_s = seconds / shards if shards else 0.0

    def call_counted(self, call: Call, counted: Counted) -> None:
        """An update is made; without shards there is nothing to know."""
        if counted.shards:
            self._recent.append(counted.seconds["compute"] / counted.shards)

    def step_took(self, seconds: Mapping[str, float], sent: tuple[int, int]) -> None:
        """A step is over.

        Args:
            seconds: the seconds of each part of the step, as in ``metrics.jsonl``.
            sent: the bytes and messages that this worker has sent since the step before.
        """
        self._seconds, self._sent = dict(seconds), sent

    @property
    def shard_s(self) -> float:
        """The median of the seconds that one shard took lately; 0 as long as too little is known."""
        return median(self._recent) if len(self._recent) >= FEWEST else 0.0

    def timings(self, formed_s: float, checkpoint_s: float) -> Timings:
        """All of it.

        Args:
            formed_s: seconds that forming the present generation took.
            checkpoint_s: seconds that the newest checkpoint took.
        """
        return Timings(
            shard_s=self._shard_s,
            step_s=self._seconds.get("total", 0.0),
            data_s=self._seconds.get("data", 0.0),
            exposed_s=self._seconds.get("exposed_communication", 0.0),
            update_s=self._seconds.get("update", 0.0),
            sent_bytes=float(self._sent[0]),
            formed_s=formed_s,
            checkpoint_s=checkpoint_s,
            sent_messages=float(self._sent[1]),
        )


class WorkerReport:
    """Asked for as late as can be: whoever wants in or out meanwhile need not wait for one step more.

    Args:
        run: the base of the run: who is asked to leave, and whether a new generation is due.
        timer: the timer of this worker's steps.
    """

    def __init__(self, run: RunBase, timer: Timer) -> None:
        self._membership, self._leave, self._checkpoints = run.membership, run.leave, run.checkpoints
        self._timer = timer

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
            checkpoint=self._membership.wants_checkpoint,
            digest=seen.digest,
            amiss=seen.amiss,
            timings=self._timer.timings(formed_s, self._checkpoints.seconds),
        )

    def told(self, formed_s: float) -> dict[str, Any]:
        """The same as JSON, where workers synchronise."""
        flags = self.flags(formed_s, Seen())
        wants = {"leave": flags.leave, "regroup": flags.regroup, "checkpoint": flags.checkpoint}
        return {**wants, "timings": astuple(flags.timings)}


class Synchronisation:
    """Synchronises workers when the strategy says so, and before every collective call of the script.

    Under a strategy with which all workers always have the same weights, there is nothing to do.

    Args:
        run: the base of the run.
        collectives: the collective calls.
        steps: the present step computer.
        report: this worker's part of what all workers tell each other.
    """

    def __init__(self, run: RunBase, collectives: CollectiveCalls, steps: CurrentSteps, report: WorkerReport) -> None:
        self._trained, self._membership, self._checkpoints = run.trained, run.membership, run.checkpoints
        self._requests, self._listeners, self._ending = run.requests, run.listeners, run.ending
        self._collectives, self._steps, self._report = collectives, steps, report

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
        is_due = self._requests.compare or self._checkpoints.due(step.number + 1)
        ends = self._steps.computer.step_ends(step, self._collectives, is_due=is_due)
        if ends:
            self._synchronise()
        return ends

    def _synchronise(self) -> None:
        if not self._steps.computer.is_open:
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
        self._requests.note(**{name: any(one[name] for one in told) for name in ("leave", "regroup", "checkpoint")})
        setting = self._trained.setting(self._membership.workers)
        self._trained.monitors.time(setting, [Timings(*one["timings"]) for one in told])
