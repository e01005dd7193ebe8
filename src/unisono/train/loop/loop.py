"""A training loop: which steps it has, and what happens around each of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch.optim import Optimizer

from unisono.adapt.view import BatchShape
from unisono.data.loader import Loaded
from unisono.data.shards import ShardsRequest
from unisono.data.streams import generators_kept
from unisono.errors import JobMismatch
from unisono.job import differences
from unisono.plan.batches import Batch, Batches, Position
from unisono.train.model.own_update import OwnUpdate
from unisono.train.state.state import Reading, RunProgress
from unisono.train.step.call import Clip, LossFunction
from unisono.train.step.step import Step

# A loop's batches, for whichever shards this worker computes.

Load = Callable[[Iterator[ShardsRequest]], Loaded]
"""From what each step needs to what it gets."""

Part = tuple[range, BatchShape]
"""Which shards a worker computes, and of what batches."""

Requests = Callable[[Position, Part], Iterator[ShardsRequest]]
"""What a worker with this part reads in each step from a position on."""


class ShardLoader:
    """Loads step by step; starts again where it stands when this worker is given another part.

    Args:
        load: loads steps in their order.
        requests: what they need.
        part: what this worker computes now.
    """

    def __init__(self, load: Load, requests: Requests, part: Callable[[], Part]) -> None:
        self._load, self._requests, self._part = load, requests, part
        self._loaded: Loaded | None = None
        self._loaded_for: Part | None = None
        self._position: Position | None = None
        self._batches: list[Any] = []

    def at(self, position: Position) -> list[Any]:
        """The batches of this worker's shards in the step that starts at ``position``; later, those of the next one.

        Asked again for the same step it gives the same ones, or those of the shards that this worker has now.
        """
        part = self._part()
        if position != self._position:
            self._batches = self._next(position, part)
        elif part != self._loaded_for:
            with generators_kept():  # whose draws the script goes on with
                self._batches = self._next(position, part)
        self._position = position
        return self._batches

    def _next(self, position: Position, part: Part) -> list[Any]:
        if self._loaded is None or part != self._loaded_for:
            self.close()
            self._loaded, self._loaded_for = self._load(self._requests(position, part)), part
        return next(self._loaded)

    def close(self) -> None:
        """End what loads; whoever asks for a step again starts it anew."""
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = self._position = None


class LoopSteps(Protocol):
    """The part of a run that a loop calls."""

    def shards(self) -> range:
        """Which shards this worker computes now."""

    def compute(
        self,
        step: Step,
        loss_fn: LossFunction,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        clip: Clip,
        update: OwnUpdate | None,
    ) -> float:
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
        batches: the batches of each epoch.
        epochs: passes over the data set.
        stop_after: steps of the whole job after which the loop is cut short; None to go on to its end.
        stop_after_epochs: the loop is cut short once the whole job has used as many samples as so many passes over
            this data set; None to go on to its end.
        max_steps: the number of steps of the whole job with which the loop is over; None to go on to its end.
    """

    number: int
    reading: Reading
    batches: Batches
    epochs: int
    stop_after: int | None
    stop_after_epochs: int | None = None
    max_steps: int | None = None

    def steps(self, progress: RunProgress, load: Load, run: LoopSteps) -> Generator[Step, None, None]:
        """The steps that are left, each with its samples.

        Args:
            progress: the place that the run has reached.
            load: a function that loads the samples; what it returns is closed when the loop is over or left.
            run: the run's side of a loop, told of everything that happens.

        Raises:
            JobMismatch: the run stands in the middle of a loop over other data.
        """
        if self.is_behind(progress):
            return
        progress = self.entered(progress)
        run.move(progress)
        run.enter()
        with closing(ShardLoader(load, self.requests, lambda: (run.shards(), run.shape()))) as loader:
            while True:
                found = self._next(progress.position, run)
                if found is None:
                    at_end, progress = progress, run.boundary(is_end=True)
                    if progress == at_end:
                        break
                    loader.close()
                    continue
                position, batch = found
                after = replace(progress, position=self.batches.after(position, batch))
                is_last = self._next(after.position, run) is None
                step = Step(position, batch, partial(loader.at, position), run.compute, is_last=is_last)
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
        if self._is_cut(progress.position):
            run.cut_short()
        else:
            run.move(self.left(progress))

    def is_behind(self, progress: RunProgress) -> bool:
        """Whether the run has this loop behind it, or was cut short in one before."""
        return self.number < progress.loop or (self.number > progress.loop and self._is_cut(progress.position))

    def place(self, progress: RunProgress, run: LoopSteps) -> LoopPlace:
        """Where the run stands in this loop, which it has entered."""
        position = progress.position
        start, batch, cut = 0, 0, self._shaped(run.shape()).of(position.epoch)
        while start < position.offset and (stop := cut.stop(start)) is not None:
            start, batch = stop, batch + 1
        is_over = self._next(position, run) is None
        return LoopPlace(position.step, position.samples, position.epoch, batch, is_over=is_over)

    def entered(self, progress: RunProgress) -> RunProgress:
        """Where the run stands when the loop begins: where a checkpoint left it in this loop, or at its start.

        Raises:
            JobMismatch: the checkpoint was reading other data; lists the differences.
        """
        position = progress.position
        if self.number > progress.loop:  # the one before was given up
            progress = RunProgress(Position(step=position.step, samples=position.samples), self.number)
        elif progress.reading is not None and progress.reading != self.reading:
            unequal = "; ".join(differences(asdict(self.reading), asdict(progress.reading)))
            raise JobMismatch(
                f"the loop that resumes in epoch {position.epoch} reads other data than when its checkpoint was "
                f"written (here: this script, there: the checkpoint): {unequal}"
            )
        return replace(progress, reading=self.reading)

    def left(self, progress: RunProgress) -> RunProgress:
        """Where the run stands once the loop is over: before the next one."""
        position = progress.position
        return RunProgress(Position(step=position.step, samples=position.samples), self.number + 1)

    def requests(self, start: Position, part: Part) -> Iterator[ShardsRequest]:
        """What a worker with these shards of batches of this shape reads in each step from ``start`` on."""
        shards, shape = part
        for position, batch in self._shaped(shape).remaining(start, self.epochs):
            if self._is_cut(position) or self._is_full(position):
                return
            yield ShardsRequest(batch.epoch, tuple(batch.shard(shard) for shard in shards))

    def _next(self, position: Position, run: LoopSteps) -> tuple[Position, Batch] | None:
        if run.is_stopped() or self._is_full(position):
            return None
        batches = self._shaped(run.shape())
        start = batches.next_from(position, self.epochs)
        return None if start is None or self._is_cut(start) else (start, batches.at(start))

    def _is_full(self, position: Position) -> bool:
        return self.max_steps is not None and position.step >= self.max_steps

    def _shaped(self, shape: BatchShape) -> Batches:
        return replace(self.batches, batch_size=shape.samples, shards=shape.shards)

    def _is_cut(self, position: Position) -> bool:
        passes = self.stop_after_epochs
        has_passes = passes is not None and position.samples >= passes * self.batches.of(0).used
        return has_passes or (self.stop_after is not None and position.step >= self.stop_after)

    def _left(self, step: Step, progress: RunProgress, after: RunProgress, run: LoopSteps) -> None:
        """The loop was left in its body, by a break or an error: only what was committed counts."""
        is_whole = run.is_whole()
        counts = is_whole and step.calls > 0
        run.end(after if counts else None)
        if is_whole:  # a step that failed leaves the loop where it was
            run.move(self.left(after if counts else progress))
