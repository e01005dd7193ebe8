"""The course of a loop over a stream: what comes next is known when its readers have read it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from unisono.adapt.view import BatchShape
from unisono.data.stream_feed import warn_unless_promised
from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import Wish
from unisono.data.stream_source import StreamSource
from unisono.data.streams import generators_kept
from unisono.errors import CheckpointError, DataError, UnisonoWarning
from unisono.plan.batches import Batch, Position
from unisono.plan.split import even_bounds
from unisono.received import value_of
from unisono.train.group.workers import Workers
from unisono.train.loop.course import NextStep, Part, StepLoader
from unisono.train.state.state import RunProgress


@dataclass(frozen=True, slots=True)
class Told:
    """What all workers are told of one reader, before each step.

    Attributes:
        number: the number of the reader.
        samples: the number of samples that it gives for the step.
        after: its state then.
        is_over: whether nothing is left of it in this epoch.
    """

    number: int
    samples: int
    after: ReaderState
    is_over: bool


@dataclass(eq=False)
class StreamCourse:
    """The course over a stream. Reader v gives the samples of shard v, and one that is exhausted an empty shard.

    Attributes:
        source: the stream, as this worker reads it.
        readers: the number of readers.
        together: carries a collective call out.
        promised: the number of samples that the stream says it has; None if it says nothing.
    """

    source: StreamSource
    readers: int
    together: Callable[[Callable[[Workers], Any]], Any]
    promised: int | None = None
    _batch: Batch | None = field(default=None, init=False)

    def ahead(self, progress: RunProgress, epochs: int, shape: BatchShape) -> NextStep | None:
        """The step behind some progress, which is read now. A collective call."""
        while progress.position.epoch < epochs:
            if (found := self._read(progress, epochs, shape)) is not None:
                return found
            progress = _epoch_over(progress)
        return None

    def loader(self, part: Callable[[], Part], epochs: int, is_cut: Callable[[Position], bool]) -> StepLoader:
        """What gives the batches that were read."""
        return StreamLoader(self, part)

    def batches_over(self, progress: RunProgress, shape: BatchShape) -> int:
        """The number of batches of the present epoch that are over, by the reader that has come furthest."""
        counts = [stop - start for start, stop in pairwise(even_bounds(shape.samples, self.readers))]
        given = zip(progress.readers, counts, strict=False)
        return max((-(-state.samples // count) for state, count in given if count), default=0)

    def behind(self, position: Position, steps: int, epochs: int) -> Position:
        """Only reading tells where steps of a stream end."""
        if steps:
            raise DataError(
                f"run.steps(begin={steps}) of a stream: it would have to be read from its beginning. Go on from a "
                f"checkpoint of the run's own (unisono.init(checkpoints={{'every': …}})), which knows how far it was "
                "read"
            )
        return position

    def is_over(self, position: Position, epochs: int, shape: BatchShape) -> bool:
        """Whether no epoch is left; what is left of one is only known when it is read."""
        return position.epoch >= epochs

    def has_passed(self, position: Position, epochs: int) -> bool:
        """Whether the loop has gone through the stream so many times."""
        return position.epoch >= epochs

    def batches(self, shards: Sequence[int]) -> list[Any]:
        """The batches of some shards of the step that was read last."""
        assert self._batch is not None, "a step was read"
        return self.source.of(self._batch, shards)

    def _read(self, progress: RunProgress, epochs: int, shape: BatchShape) -> NextStep | None:
        position = progress.position
        states = progress.readers or (ReaderState(),) * self.readers
        if len(states) != self.readers:
            raise CheckpointError(
                f"the checkpoint holds {len(states)} readers of the stream, the job has {self.readers}"
            )
        if (given := sum(one.samples for one in states)) != position.offset:
            raise CheckpointError(
                f"the checkpoint stands after {position.offset} samples of epoch {position.epoch}, and its readers of "
                f"the stream have given {given}: it is damaged, or was written when the data were no stream. Go on "
                f"from another checkpoint, or start in a new folder"
            )
        told = value_of(
            list[Told], self.together(partial(self._told, position.epoch, states, shape)), "what readers told"
        )
        bounds = (0, *accumulate(one.samples for one in told))
        if not bounds[-1]:
            if not position.offset and not position.epoch:
                raise DataError("the stream is empty: check the path, the split or the filter it was made with")
            return None
        is_last_in_epoch = all(one.is_over for one in told)
        if not position.epoch and not position.offset:
            self._warn_of_empty(told)
        start, stop = position.offset, position.offset + bounds[-1]
        self._batch = Batch(position.epoch, start, stop, bounds, is_last_in_epoch)
        self.source.begin(states)
        if is_last_in_epoch:
            warn_unless_promised(f"epoch {position.epoch} of the stream", stop, self.promised)
        moved = replace(position, step=position.step + 1, samples=position.samples + bounds[-1], offset=stop)
        after = replace(progress, position=moved, readers=tuple(one.after for one in told))
        after = _epoch_over(after) if is_last_in_epoch else after
        return NextStep(position, self._batch, after, after.position.epoch >= epochs)

    def _warn_of_empty(self, told: Sequence[Told]) -> None:
        empty = [one.number for one in told if one.is_over and not one.samples]
        if empty:
            warnings.warn(
                f"{len(empty)} of the {self.readers} readers of the stream have nothing to read, number {empty[0]} "
                f"among them, and their shards are empty: batches are smaller by as much, and workers wait. Split the "
                f"stream into at least {self.readers} parts (files), one for each shard, or set fewer shards",
                UnisonoWarning,
                stacklevel=2,
            )

    def _told(
        self, epoch: int, states: Sequence[ReaderState], shape: BatchShape, workers: Workers
    ) -> list[dict[str, Any]]:
        bounds, mine = even_bounds(shape.samples, self.readers), workers.split(self.readers).of(workers.rank)
        wishes = [Wish(epoch, number, states[number], bounds[number + 1] - bounds[number]) for number in mine]
        told = []
        for given in self.source.read(wishes):
            after = {"samples": given.after.samples, "state": given.after.state}
            told.append({"number": given.number, "samples": given.samples, "after": after, "is_over": given.is_over})
            workers.tick()
        return sorted((one for each in workers.gather_json(told) for one in each), key=lambda one: int(one["number"]))


class StreamLoader:
    """Gives the batches of a stream's steps.

    Args:
        course: the course, which has read them.
        part: what this worker computes now.
    """

    def __init__(self, course: StreamCourse, part: Callable[[], Part]) -> None:
        self._course, self._part = course, part
        self._given: tuple[Position, Part] | None = None
        self._batches: list[Any] = []

    def at(self, position: Position) -> list[Any]:
        """The batches of the shards that this worker has now, in the step that was read last."""
        part = self._part()
        if (position, part) != self._given:
            with generators_kept():  # whose draws the script goes on with
                self._batches = self._course.batches(part[0])
            self._given = position, part
        return self._batches

    def close(self) -> None:
        """Close the readers; whoever asks for a step again gets what is read then."""
        self._given = None
        self._course.source.close()


def _epoch_over(progress: RunProgress) -> RunProgress:
    position = replace(progress.position, epoch=progress.position.epoch + 1, offset=0)
    return replace(progress, position=position, readers=())
