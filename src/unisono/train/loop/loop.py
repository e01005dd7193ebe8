"""A training loop: which steps it has, and what happens around each of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

from unisono.adapt.view import BatchShape
from unisono.errors import JobMismatch
from unisono.job import differences
from unisono.plan.batches import Position
from unisono.train.loop.course import Course, NextStep
from unisono.train.state.state import Reading, RunProgress
from unisono.train.step.step import Compute, Step

OTHER_SAMPLES = (
    "Samples hold something else: data that are split, shuffled or made with random numbers need a seed, or are drawn "
    "after unisono.init. To go on with other data all the same: --allow-job-change"
)
"""What to do where only the samples themselves differ."""


class LoopSteps(Protocol):
    """The part of a run that a loop calls."""

    def shards(self) -> Sequence[int]:
        """Which shards this process computes now."""

    @property
    def compute(self) -> Compute:
        """What a step's ``run`` calls."""

    def move(self, progress: RunProgress) -> None:
        """The run stands here now."""

    def begin(self, step: Step) -> None:
        """A step's samples are loaded, and the loop's body comes next."""

    def end(self, after: RunProgress | None) -> None:
        """The body is done, and the run stands here; or it was left, and nothing of the step counts (None)."""

    def enter(self) -> None:
        """The loop begins, before its first step."""

    def boundary(self, *, is_end: bool) -> RunProgress:
        """Between two steps, where every worker stands with the same state, or at the loop's end.

        Returns:
            where the run stands after it: usually where it did, but it may have gone back.
        """

    def is_whole(self) -> bool:
        """Whether what the step computed counts: no call of ``step.run`` has failed, the run is open."""

    def shape(self) -> BatchShape:
        """Of the next global batch."""

    def is_stopped(self) -> bool:
        """Whether the loop is to end at this boundary."""

    def cut_short(self) -> None:
        """The loop is over before its end, and the run stays where it is."""


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
    """One loop over a data set.

    Attributes:
        number: the number of the loop in the script, from 0.
        reading: the settings that decide which samples its batches hold.
        course: the steps that it has, and what is loaded for them.
        epochs: passes over the data set.
        stop_after: steps of the whole job after which the loop is cut short; None to go on to its end.
        stop_after_epochs: the loop is cut short once the whole job has used as many samples as so many passes over
            this data set; None to go on to its end.
        max_steps: the number of steps of the whole job with which the loop is over; None to go on to its end.
        begin: the number of its first steps that a checkpoint of somebody else's has behind it.
    """

    number: int
    reading: Reading
    course: Course
    epochs: int
    stop_after: int | None
    stop_after_epochs: int | None = None
    max_steps: int | None = None
    begin: int = 0

    def steps(self, progress: RunProgress, run: LoopSteps) -> Generator[Step, None, None]:
        """The steps that are left, each with its samples.

        Args:
            progress: the place that the run has reached.
            run: the run's side of a loop, told of everything that happens.

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
                ahead = self._ahead(progress, run)
                if ahead is None:
                    at_end, progress = progress, run.boundary(is_end=True)
                    if progress == at_end:
                        break
                    loader.close()
                    continue
                position, after = ahead.position, ahead.after
                is_last = ahead.is_last or self.ends_at(after.position)
                step = Step(position, ahead.batch, partial(loader.at, position), run.compute, is_last=is_last)
                run.begin(step)
                try:
                    yield step
                except GeneratorExit:
                    self._left(step, progress, after, run)
                    raise
                run.end(after)
                progress = run.boundary(is_end=False)
                if progress != after:
                    loader.close()
        if self.is_cut(progress.position):
            run.cut_short()
        else:
            run.move(self.left(progress))

    def is_behind(self, progress: RunProgress) -> bool:
        """Whether the run has this loop behind it, or was cut short in one before."""
        return self.number < progress.loop or (self.number > progress.loop and self.is_cut(progress.position))

    def is_under_way(self, progress: RunProgress) -> bool:
        """Whether the run stands in the middle of this loop."""
        return self.number == progress.loop and progress.reading is not None

    def place(self, progress: RunProgress, run: LoopSteps) -> LoopPlace:
        """Where the run stands in this loop, which it has entered."""
        position, shape = progress.position, run.shape()
        batch = self.course.batches_over(progress, shape)
        is_over = run.is_stopped() or self.ends_at(position) or self.course.is_over(position, self.epochs, shape)
        return LoopPlace(position.step, position.samples, position.epoch, batch, is_over=is_over)

    def entered(self, progress: RunProgress) -> RunProgress:
        """Where the run stands when the loop begins: where a checkpoint left it in this loop, or at its start.

        Raises:
            JobMismatch: the checkpoint was reading other data; lists the differences.
        """
        position = progress.position
        if self.number > progress.loop:  # the one before was given up
            progress = RunProgress(Position(step=position.step, samples=position.samples), self.number)
        elif progress.reading is not None and not self.reading.goes_on(progress.reading):
            unequal = "; ".join(differences(asdict(self.reading), asdict(progress.reading)))
            raise JobMismatch(
                f"the loop that resumes in epoch {position.epoch} reads other data than when its checkpoint was "
                f"written (here: this script, there: the checkpoint): {unequal}"
                + ("" if self.reading.content in ("", progress.reading.content) else f". {OTHER_SAMPLES}")
            )
        if progress.reading is None:
            begun = self.course.behind(progress.position, self.begin, self.epochs)
            progress = replace(progress, position=begun)
        return replace(progress, reading=self.reading)

    def left(self, progress: RunProgress) -> RunProgress:
        """Where the run stands once the loop is over: before the next one."""
        position = progress.position
        return RunProgress(Position(step=position.step, samples=position.samples), self.number + 1)

    def passed_by(self, progress: RunProgress) -> RunProgress:
        """Where the run stands when the loop is left, and none of its steps was asked for."""
        is_shut = self.is_behind(progress) or self.is_cut(progress.position)
        return progress if is_shut else self.left(progress)

    def ends_at(self, position: Position) -> bool:
        """Whether the loop goes no further than a position."""
        return self.is_cut(position) or (self.max_steps is not None and position.step >= self.max_steps)

    def _ahead(self, progress: RunProgress, run: LoopSteps) -> NextStep | None:
        if run.is_stopped() or self.ends_at(progress.position):
            return None
        return self.course.ahead(progress, self.epochs, run.shape())

    def is_cut(self, position: Position) -> bool:
        """Whether the loop is cut short at a position."""
        passes = self.stop_after_epochs
        has_passes = passes is not None and self.course.has_passed(position, passes)
        return has_passes or (self.stop_after is not None and position.step >= self.stop_after)

    def _left(self, step: Step, progress: RunProgress, after: RunProgress, run: LoopSteps) -> None:
        """The loop was left in its body, by a break or an error: only what was committed counts."""
        is_whole = run.is_whole()
        counts = is_whole and step.calls > 0
        run.end(after if counts else None)
        if is_whole:  # a step that failed leaves the loop where it was
            run.move(self.left(after if counts else progress))
