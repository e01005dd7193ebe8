"""The training loops of a run: what happens before, during and after each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any

from unisono.adapt.view import BatchShape
from unisono.data.feed import Options
from unisono.errors import JobError, JobMismatch
from unisono.host.tracebacks import warn
from unisono.job import differences
from unisono.plan.batches import Position
from unisono.train.loop.course import Course, NextStep
from unisono.train.loop.loop_data import LoopData, LoopDataSets, require_counts, require_strategy
from unisono.train.recovery.boundary import Boundary
from unisono.train.state.trained import Reading, RunProgress
from unisono.train.step.current import StepComputer
from unisono.train.step.step import Step
from unisono.train.step_body import StepBody

OTHER_SAMPLES = (
    "Samples hold something else: data that are split, shuffled or made with random numbers need a seed, or are drawn "
    "after unisono.init. To go on with other data all the same: --allow-job-change"
)
"""Advice for data that differ in nothing but the samples themselves."""


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """The place that a run has reached in a loop, before its first step there.

    Attributes:
        step: the number of steps in the whole job so far, which is the number of the next one.
        samples: the number of samples consumed in the whole job so far.
        epoch: the number of the epoch that the next step is in.
        batch: the number of batches of that epoch that are over, all of the present size.
        is_over: whether nothing is left of the loop.
    """

    step: int
    samples: int
    epoch: int = 0
    batch: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over a data set.

    Attributes:
        number: the number of the loop in the script, from 0.
        stop_after: the number of steps of the whole job after which the loop is cut short; None to go on to its end.
        stop_after_epochs: the number of passes over this data set after whose samples, counted over the whole job, the
            loop is cut short; None to go on to its end.
        max_steps: the number of steps of the whole job with which the loop is over; None to go on to its end.
        begin: the number of its first steps that a checkpoint of a framework's own has behind it.
    """

    number: int
    reading: Reading
    course: Course
    epochs: int
    stop_after: int | None
    stop_after_epochs: int | None = None
    max_steps: int | None = None
    begin: int = 0

    def steps(self, progress: RunProgress, run: StepLoop) -> Generator[Step, None, None]:
        """Yield the steps that are left, each with its samples.

        Raises:
            JobMismatch: the run stands in the middle of a loop over other data.
        """
        if self.is_behind(progress):
            return
        progress = self.entered(progress)
        run.move(progress)
        run.enter()
        with closing(self.course.loader(lambda: (run.shards(), run.shape()), self.epochs, self.ends_at)) as loader:
            while True:
                next_step = self._ahead(progress, run)
                if next_step is None:
                    at_end, progress = progress, run.boundary(is_end=True)
                    if progress == at_end:
                        break
                    loader.close()  # the run has gone back: steps come again
                    continue
                position, after = next_step.position, next_step.after
                is_last = next_step.is_last or self.ends_at(after.position)
                step = Step(position, next_step.batch, partial(loader.at, position), run.compute, is_last=is_last)
                run.begin(step)
                try:
                    yield step
                except GeneratorExit:
                    self._left(step, progress, after, run)
                    raise
                run.end(after)
                progress = run.boundary(is_end=False)
                if progress != after:  # the run has gone back
                    loader.close()
        if self.is_cut(progress.position):
            run.cut_short()
        else:
            run.move(self.left(progress))

    def is_behind(self, progress: RunProgress) -> bool:
        """Whether the run has finished this loop, or was cut short in an earlier one."""
        return self.number < progress.loop or (self.number > progress.loop and self.is_cut(progress.position))

    def is_under_way(self, progress: RunProgress) -> bool:
        """Whether the run stands in the middle of this loop."""
        return self.number == progress.loop and progress.reading is not None

    def place(self, progress: RunProgress, run: StepLoop) -> LoopPlace:
        """Return the place that the run has reached in this loop, which it has entered."""
        position, shape = progress.position, run.shape()
        batch = self.course.batches_over(progress, shape)
        is_over = run.is_stopped() or self.ends_at(position) or self.course.is_over(position, self.epochs, shape)
        return LoopPlace(position.step, position.samples, position.epoch, batch, is_over=is_over)

    def entered(self, progress: RunProgress) -> RunProgress:
        """Return the run's progress when the loop begins: where a checkpoint left it in this loop, or at its start.

        Raises:
            JobMismatch: the checkpoint was reading other data; lists the differences.
        """
        position = progress.position
        if self.number > progress.loop:  # the loop before was given up
            progress = RunProgress(Position(step=position.step, samples=position.samples), self.number)
        elif progress.reading is not None and not self.reading.can_continue(progress.reading):
            unequal = "; ".join(differences(asdict(self.reading), asdict(progress.reading)))
            raise JobMismatch(
                f"the loop that resumes in epoch {position.epoch} reads other data than when its checkpoint was "
                f"written (here: this script, there: the checkpoint): {unequal}"
                + ("" if self.reading.content in ("", progress.reading.content) else f". {OTHER_SAMPLES}")
            )
        if progress.reading is None:
            start = self.course.behind(progress.position, self.begin, self.epochs)
            progress = replace(progress, position=start)
        return replace(progress, reading=self.reading)

    def left(self, progress: RunProgress) -> RunProgress:
        """Return the run's progress once the loop is over, before the next one."""
        position = progress.position
        return RunProgress(Position(step=position.step, samples=position.samples), self.number + 1)

    def passed_by(self, progress: RunProgress) -> RunProgress:
        """Return the run's progress when the loop is left before any of its steps was asked for."""
        is_shut = self.is_behind(progress) or self.is_cut(progress.position)
        return progress if is_shut else self.left(progress)

    def ends_at(self, position: Position) -> bool:
        """Whether the loop ends at a position."""
        return self.is_cut(position) or (self.max_steps is not None and position.step >= self.max_steps)

    def _ahead(self, progress: RunProgress, run: StepLoop) -> NextStep | None:
        if run.is_stopped() or self.ends_at(progress.position):
            return None
        return self.course.ahead(progress, self.epochs, run.shape())

    def is_cut(self, position: Position) -> bool:
        """Whether the loop is cut short at a position."""
        passes = self.stop_after_epochs
        has_passes = passes is not None and self.course.has_passed(position, passes)
        return has_passes or (self.stop_after is not None and position.step >= self.stop_after)

    def _left(self, step: Step, progress: RunProgress, after: RunProgress, run: StepLoop) -> None:
        """Leave the loop in its body, after a break or an error: only committed steps count."""
        is_whole = run.is_whole()
        counts = is_whole and step.calls > 0
        run.end(after if counts else None)
        if is_whole:  # after a step that failed, the loop stays where it was
            run.move(self.left(after if counts else progress))


@dataclass(eq=False)
class StepLoop:
    """Carries out the loops of a run, one at a time."""

    body: StepBody
    between: Boundary
    data_sets: LoopDataSets
    _live: weakref.ref[Generator[Step, None, None]] | None = field(default=None, init=False)
    _data: LoopData | None = field(default=None, init=False)
    _required: tuple[BatchShape, StepComputer] | None = field(default=None, init=False)  # accepted by the data
    _coming: _Coming | None = field(default=None, init=False)  # until the first of its steps is asked for
    _has_sizes: bool = field(default=False, init=False)  # whether loops of the script have batch sizes of their own
    _number: int = field(default=-1, init=False)
    _joined: bool = field(default=False, init=False)  # whether this worker joins in the middle of the present loop

    def __post_init__(self) -> None:
        self.run, self.steps, self.collectives = self.body.run, self.body.steps, self.body.collectives
        self.config, self.membership, self.trained = self.run.config, self.run.membership, self.run.trained
        self.shards, self.cut_short, self.boundary = self.steps.shards, self.between.cut_short, self.between.reached
        self.begin, self.compute, self.end = self.body.begin, self.body.compute, self.body.end

    def over(
        self, dataset: Any, epochs: int, options: Options, max_steps: int | None, batch_size: int | None, begin: int
    ) -> Generator[Step, None, None]:
        """Make the steps of a loop over a data set; see :meth:`Run.steps`."""
        require_counts(epochs, max_steps, begin)
        self._forgo()
        if self.steps.under_way is not None:
            raise JobError("run.steps inside of another run.steps: one loop at a time; end the first one before")
        feed = self.data_sets.feed(dataset, options, self.trained.loops, epochs)
        require_strategy(feed, str(self.steps.strategy), has_own_weights=self.steps.computer.has_own_weights)
        self.body.synchronisation.before_call()
        data = self.data_sets.agreed(dataset, feed, epochs, batch_size, begin)
        self._has_sizes |= data.own_size
        coming = self._coming = _Coming(partial(self._enter, data, max_steps, begin))
        steps = self._loop(coming)
        self._live = weakref.ref(steps)  # weak: a break lets go of the only reference, and so ends the loop
        return steps

    def leave(self) -> None:
        """End a loop that was left while somebody still holds its steps: it may have loader processes."""
        self._forgo()
        steps = None if self._live is None else self._live()
        if steps is not None and getgeneratorstate(steps) != GEN_RUNNING:
            steps.close()

    def finish(self) -> None:
        """End the loop, since the script finishes the run; warn if there were steps, and none updated anything."""
        self.leave()
        progress = self.trained.progress
        if self.trained.restored is not None and self.trained.loops < progress.loop + (progress.reading is not None):
            raise JobMismatch(
                f"the script has come to run.finish in front of its loop {self.trained.loops + 1}, and the run goes on "
                f"in loop {progress.loop + 1}, where its checkpoint was written: what decides between loops (early "
                f"stopping) has to be registered (run.register), or use one loop: run.epochs, or run.steps(…, epochs=n)"
            )
        is_idle = self.body.has_begun and not (self.body.has_trained or self.body.steps.is_computing)
        if is_idle and self.membership.is_main:
            warn("nothing was trained: step.run(loss_fn) was called in no step of this run. Call it in the loop's body")

    def enter_next(self) -> LoopPlace:
        """Enter the newest loop before its steps are asked for; see :meth:`Run.enter`."""
        if self._coming is None:
            raise JobError(
                "run.enter: there is no loop to enter. Call it between steps = run.steps(…) and its first step"
            )
        loop, progress = self._coming(), self.trained.progress
        if loop is None or loop.is_behind(progress):
            return LoopPlace(progress.position.step, progress.position.samples, is_over=True)
        self.move(loop.entered(progress))
        self.between.snapshots.settle()
        return loop.place(self.trained.progress, self)

    def shape(self) -> BatchShape:
        """Return the shape of the next global batch.

        Raises:
            PolicyError: a policy wants a batch that the data cannot have.
            JobError: the workers no longer make the steps of a stream together.
        """
        shape = self.trained.policy_state.shape
        if self._data is not None and (shape, self.steps.computer) != self._required:
            has_own_weights = self.steps.computer.has_own_weights
            self._data.require(shape, str(self.steps.strategy), has_own_weights=has_own_weights)
            self._required = shape, self.steps.computer
        return shape

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps in an epoch of the present loop, with the present batch size."""
        assert self._data is not None, "a loop is under way"
        return self._data.steps_in(epoch, self.shape().samples)

    def place_of(self, step: Step) -> tuple[int, int, int]:
        """Return how many epochs the loop has, how many steps that of ``step`` has, and how many of these are over."""
        steps = self.steps_in(step.epoch)
        assert self._data is not None, "a loop is under way"
        return self._data.epochs, steps, min(self.batches_before(step), max(0, steps - 1))

    def batches_before(self, step: Step) -> int:
        """Return how many batches of the step's epoch are over, all of the present size."""
        return -(-step.batch.start // max(1, self.shape().samples))

    def is_stopped(self) -> bool:
        """Whether a policy or a guest has stopped the loop."""
        return self.trained.policy_state.stopped == self._number

    def end_here(self) -> None:
        """End the loop with the present step.

        It is compared as a loop's last step is. If a fault sets the run back, this is taken back, too.
        """
        self.trained.policy_state.stopped = self._number

    def compare_next(self) -> None:
        """Have the state compared at the next boundary, since all workers may leave the loop there."""
        self.between.requests.compare = True

    def is_whole(self) -> bool:
        """Whether the results of the present step count."""
        return not (self.steps.is_computing or self.run.ending.is_closed or self.trained.is_doubted)

    def move(self, progress: RunProgress) -> None:
        """Set the run's progress."""
        self.trained.progress = progress

    def enter(self) -> None:
        """Begin a loop. A joiner in the middle of it does not compare the state: the others have done so."""
        if not self._joined:
            self.body.synchronisation.before_call()
            self.between.verification.require_right()

    def _enter(self, data: LoopData, max_steps: int | None, begin: int) -> Loop | None:
        """Begin a loop, together with the others. Returns None if they have finished it."""
        number = self._number = self.trained.loops
        self.trained.loops += 1
        course, source = data.course(self.config, self.collectives)
        special = self.config.settings.special
        cuts = special.stop_after, special.stop_after_epochs
        loop = Loop(number, data.reading, course, data.epochs, *cuts, max_steps, begin)
        self._joined, self.body.source, self._data, self._required = self.membership.joins, source, data, None
        self.steps.is_computing = False
        self.run.listeners.loop_begins(number, data.batches, data.feed.order)
        if not self.collectives.enter(number):
            self.body.seed_behind(number)
            return None
        if self._has_sizes and not loop.is_behind(progress := self.trained.progress):
            is_under_way = loop.is_under_way(progress)
            self.trained.policy_state.begin_loop(data.batches.batch_size, is_under_way=is_under_way)
        self.body.policy_runner.begin()
        if not loop.is_behind(progress := self.trained.progress):
            self.data_sets.watch.enter(is_under_way=loop.is_under_way(progress))
        return loop

    def _loop(self, begun: Callable[[], Loop | None]) -> Generator[Step, None, None]:
        if (loop := begun()) is None:
            return
        self._coming = None
        try:
            yield from loop.steps(self.trained.progress, self)
        except GeneratorExit:  # a break, or a run that is closed in the middle of the loop
            if self.is_whole():
                self._leave(loop)
            raise
        self._leave(loop)

    def _leave(self, loop: Loop) -> None:
        self.collectives.leave(loop.number)
        self.body.seed_behind(loop.number)

    def _forgo(self) -> None:
        """Leave a loop that was entered, and none of whose steps was asked for."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.loop is not None and self.is_whole():
            self.move(coming.loop.passed_by(self.trained.progress))
            self._leave(coming.loop)


class _Coming:
    """A loop that a script has made, and may enter before it asks for steps. ``begin`` is called once."""

    def __init__(self, begin: Callable[[], Loop | None]) -> None:
        self.loop: Loop | None = None
        self._begin: Callable[[], Loop | None] | None = begin

    def __call__(self) -> Loop | None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self.loop = begin()
        return self.loop
