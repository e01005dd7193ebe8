"""The requests and times that workers exchange, and how workers with weights of their own synchronise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from unisono.adapt.view import Timings
from unisono.errors import JobMismatch
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.step.current import CurrentSteps, Messages
from unisono.train.step.listeners import Counted, Listener
from unisono.train.step.part import Attempt, Part
from unisono.train.step.run_base import RunBase
from unisono.train.step.step import Call, Step
from unisono.train.step.word import Field

RECENT = 9
"""The number of calls over which the median time of a shard is taken."""

FEWEST = 3
"""The number of calls from which on there is a median."""


class Timer(Listener):
    """Keeps the times of a step until the next control word, which sends them.

    It has to be the last of the listeners, so that its times include the time that the other listeners take.
    """

    def __init__(self) -> None:
        self._shard_s = 0.0
        self._seconds: Mapping[str, float] = {}
        self._sent = 0, 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def step_computed(self, step: Step, shards: int, seconds: float) -> None:
        """Keep the seconds per shard."""
        self._shard_s = seconds / shards if shards else 0.0

    def call_counted(self, call: Call, counted: Counted) -> None:
        """Keep the seconds per shard, if this worker has shards, for the median."""
        if counted.shards:
            self._recent.append(counted.seconds["compute"] / counted.shards)

    def step_took(self, seconds: Mapping[str, float], sent: tuple[int, int]) -> None:
        """Keep the times of a finished step.

        ``seconds`` are those of each part, as in ``metrics.jsonl``; ``sent`` are the bytes and messages since the step
        before.
        """
        self._seconds, self._sent = dict(seconds), sent

    @property
    def shard_s(self) -> float:
        """The median of the seconds per shard in recent calls; 0 until there are enough of them."""
        return median(self._recent) if len(self._recent) >= FEWEST else 0.0

    def timings(self, formed_s: float, checkpoint_s: float) -> tuple[float, ...]:
        """All times, in the order of :class:`Timings`."""
        seconds = self._seconds.get
        return (
            self._shard_s,
            seconds("total", 0.0),
            seconds("data", 0.0),
            seconds("exposed_communication", 0.0),
            seconds("update", 0.0),
            float(self._sent[0]),
            formed_s,
            checkpoint_s,
            float(self._sent[1]),
        )


class RequestFields(Part):
    """Lets workers agree on who leaves or joins, and whether a checkpoint is written.

    The values are read as late as possible, so that a request that comes during a step need not wait for the next one.
    """

    fields = (Field("leave"), Field("regroup"), Field("checkpoint"))

    def __init__(self, run: RunBase) -> None:
        self._membership, self._leave, self._requests = run.membership, run.leave, run.requests
        self._requested: Sequence[bool] = ()

    def tell(self, attempt: Attempt | None = None) -> tuple[bool, bool, bool]:
        """The requests that this worker knows of."""
        leaves = self._leave.requested and not self._membership.leave()
        return leaves, self._membership.is_due, self._membership.wants_checkpoint

    def hear(self, attempt: Attempt, *requested: bool) -> None:
        """Keep the requests that any worker knows of."""
        self._requested = requested

    def note(self, attempt: Attempt) -> None:
        """Note the requests, on which all workers agree now."""
        if True in self._requested:
            self._requests.note(**dict(zip(REQUESTS, self._requested, strict=True)))


REQUESTS = [field.name for field in RequestFields.fields]


class TimeFields(Part):
    """Sends the times of every worker to all workers.

    Attributes:
        formed_s: the seconds that it took to form the present generation.
    """

    fields = tuple(Field(name, "d", "each") for name in Timings.__slots__)

    def __init__(self, run: RunBase, timer: Timer) -> None:
        self._trained, self._membership, self._checkpoints = run.trained, run.membership, run.checkpoints
        self._keeps_all = run.config.settings.special.study or not run.trained.policy_state.is_empty
        self._timer, self.formed_s = timer, 0.0
        self._timings: Sequence[Timings] = ()

    def tell(self, attempt: Attempt | None = None) -> tuple[float, ...]:
        """This worker's times of the last step."""
        return self._timer.timings(self.formed_s, self._checkpoints.seconds)

    def hear(self, attempt: Attempt, *columns: Sequence[float]) -> None:
        """Keep the times of all workers."""
        if attempt.call.number == 0:
            self._timings = [*map(Timings, *columns)]
            self._setting = self._trained.setting(self._membership.workers)

    def note(self, attempt: Attempt) -> None:
        """Add the times to the measurements and to the figures of the step."""
        if attempt.call.number:
            return
        monitors = self._trained.monitors
        monitors.time(self._setting, self._timings)
        if attempt.trouble:
            return
        if attempt.norms is not None or self._keeps_all:
            attempt.figures |= monitors.times
        else:
            attempt.figures["shard_s"] = [float(f"{timings.shard_s:.4g}") for timings in self._timings]


class Synchronisation:
    """Synchronises workers when the strategy says so, and before every collective call of the script.

    It does nothing under a strategy with which all workers always have the same weights.
    """

    def __init__(
        self,
        run: RunBase,
        collectives: CollectiveCalls,
        steps: CurrentSteps,
        request_fields: RequestFields,
        times: TimeFields,
    ) -> None:
        self._trained, self._membership, self._checkpoints = run.trained, run.membership, run.checkpoints
        self._requests, self._listeners, self._ending = run.requests, run.listeners, run.ending
        self._collectives, self._steps, self._request_fields, self._times = collectives, steps, request_fields, times
        self._first: list[Callable[[], None]] = []

    def first(self, act: Callable[[], None]) -> None:
        """Call a function before each collective call of the script: a loop of its own has to be where that can be."""
        self._first.append(act)

    def before_call(self) -> None:
        """Synchronise before a collective call, for which all workers need to hold the same weights.

        A joiner makes no such call; it gets the result from the others.

        Raises:
            JobError: the run is over.
            JobMismatch: the script has left the loop in which the run was about to go back to an older state.
        """
        self._ending.require_open()
        for act in self._first:
            act()
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
        """End a step on this worker. Return whether all workers have the same weights after it."""
        is_due = self._requests.compare or self._checkpoints.due(step.number + 1)
        ends = self._steps.computer.step_ends(step, self._collectives, is_due=is_due)
        if ends:
            self._synchronise()
        return ends

    def _synchronise(self) -> None:
        if not self._steps.computer.is_open:
            return
        step = self._trained.progress.position.step
        messages = self._steps.computer.synchronise(step, self._describe, self._receive, self._collectives)
        if any(message["samples"] for message in messages):
            strategy = str(self._steps.strategy)
            self._listeners.round_ended(messages, strategy)

    def _describe(self) -> Mapping[str, Any]:
        self._times.formed_s = self._collectives.formed_s
        return {**dict(zip(REQUESTS, self._request_fields.tell(), strict=True)), "timings": self._times.tell()}

    def _receive(self, messages: Messages) -> None:
        """Note the messages of all workers, in the change with which they synchronise."""
        self._requests.note(**{name: any(message[name] for message in messages) for name in REQUESTS})
        setting = self._trained.setting(self._membership.workers)
        self._trained.monitors.time(setting, [Timings(*message["timings"]) for message in messages])
