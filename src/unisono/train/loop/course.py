"""The course of a loop: which steps it has, and what each step loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, Protocol

from unisono.adapt.view import BatchShape
from unisono.data.feeds import warn_unless_promised
from unisono.data.generators import generators_kept
from unisono.data.loading import Loaded
from unisono.data.shards import ShardsRequest
from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import StreamSource, Wish
from unisono.errors import CheckpointError, DataError
from unisono.host.tracebacks import warn
from unisono.plan.batches import Batch, Batches, Position
from unisono.plan.split import even_bounds
from unisono.received import value_of
from unisono.train.group.workers import Workers
from unisono.train.state.trained import RunProgress


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step that comes next. ``is_last`` says that no step follows, as far as is known."""

    position: Position
    batch: Batch
    after: RunProgress
    is_last: bool


class StepLoader(Protocol):
    """Loads the data of one step after the other."""

    def at(self, position: Position) -> list[Any]:
        """Return the batches of the shards that this worker has now, in the step that starts at ``position``."""

    def close(self) -> None:
        """End loading. A later call of :meth:`at` starts it anew."""


class Course(Protocol):
    """The steps of a loop."""

    def ahead(self, progress: RunProgress, epochs: int, shape: BatchShape) -> NextStep | None:
        """Return the step that follows on ``progress``, with a batch of this shape; None if there is none.

        May be a collective call.
        """

    def loader(self, part: Callable[[], Part], epochs: int, is_cut: Callable[[Position], bool]) -> StepLoader:
        """Return what loads the steps.

        ``part`` returns what this worker computes now, ``is_cut`` whether the loop is cut short at a position.
        """

    def batches_over(self, progress: RunProgress, shape: BatchShape) -> int:
        """Return the number of batches of the present epoch that are over, if all have this shape."""

    def behind(self, position: Position, steps: int, epochs: int) -> Position:
        """Return the position after so many steps from a position on, all of the loop's own batch size.

        Raises:
            DataError: the position cannot be told.
        """

    def is_over(self, position: Position, epochs: int, shape: BatchShape) -> bool:
        """Whether nothing is left after a position, as far as is known. No collective call."""

    def has_passed(self, position: Position, epochs: int) -> bool:
        """Whether the job has used the data ``epochs`` times."""


@dataclass(frozen=True, slots=True)
class CutCourse:
    """The course over data whose epochs are known beforehand."""

    batches: Batches
    load: Load

    def ahead(self, progress: RunProgress, epochs: int, shape: BatchShape) -> NextStep | None:
        """Return the step that follows on ``progress``, with a batch of this shape; None if there is none."""
        batches = self._shaped(shape)
        start = batches.next_from(progress.position, epochs)
        if start is None:
            return None
        batch = batches.at(start)
        after = replace(progress, position=batches.after(start, batch))
        return NextStep(start, batch, after, batches.next_from(after.position, epochs) is None)

    def loader(self, part: Callable[[], Part], epochs: int, is_cut: Callable[[Position], bool]) -> StepLoader:
        """Return what loads the steps, ahead of time."""
        return ShardLoader(self.load, partial(self.requests, epochs, is_cut), part)

    def requests(
        self, epochs: int, is_cut: Callable[[Position], bool], start: Position, part: Part
    ) -> Iterator[ShardsRequest]:
        """Yield what a worker with this part reads in each step from ``start`` on."""
        shards, shape = part
        for position, batch in self._shaped(shape).remaining(start, epochs):
            if is_cut(position):
                return
            yield ShardsRequest(batch.epoch, tuple(batch.shard(shard) for shard in shards))

    def batches_over(self, progress: RunProgress, shape: BatchShape) -> int:
        """Return the number of batches of the present epoch that are over, if all have this shape."""
        start, batch, cut = 0, 0, self._shaped(shape).of(progress.position.epoch)
        while start < progress.position.offset and (stop := cut.stop(start)) is not None:
            start, batch = stop, batch + 1
        return batch

    def behind(self, position: Position, steps: int, epochs: int) -> Position:
        """Return the position after so many steps from a position on, or after the last one."""
        for start, batch in islice(self.batches.remaining(position, epochs), steps):
            position = self.batches.after(start, batch)
        return position

    def is_over(self, position: Position, epochs: int, shape: BatchShape) -> bool:
        """Whether no batch is left after a position."""
        return self._shaped(shape).next_from(position, epochs) is None

    def has_passed(self, position: Position, epochs: int) -> bool:
        """Whether the job has used as many samples as ``epochs`` passes over this data have."""
        return position.samples >= epochs * self.batches.of(0).used

    def _shaped(self, shape: BatchShape) -> Batches:
        return replace(self.batches, batch_size=shape.samples, shards=shape.shards)


Load = Callable[[Iterator[ShardsRequest]], Loaded]
"""Loads what each step requests."""

Part = tuple[Sequence[int], BatchShape]
"""The shards that a worker computes, and the shape of their batches."""

Requests = Callable[[Position, Part], Iterator[ShardsRequest]]
"""Returns what a worker with this part reads in each step from a position on."""


class ShardLoader:
    """Loads the data of one step after the other. It starts again when this worker is given another part."""

    def __init__(self, load: Load, requests: Requests, part: Callable[[], Part]) -> None:
        self._load, self._requests, self._part = load, requests, part
        self._loaded: Loaded | None = None
        self._loaded_for: Part | None = None
        self._position: Position | None = None
        self._batches: list[Any] = []

    def at(self, position: Position) -> list[Any]:
        """Return the batches of this worker's shards in the step that starts at ``position``.

        The first call starts there, and each call for another position loads the next step. Called again for the same
        position it returns the same batches, or those of the shards that this worker has now.
        """
        part = self._part()
        if position != self._position:
            self._batches = self._next(position, part)
        elif part != self._loaded_for:
            with generators_kept():  # the script's draws go on as if nothing had been loaded
                self._batches = self._next(position, part)
        self._position = position
        return self._batches

    def _next(self, position: Position, part: Part) -> list[Any]:
        if self._loaded is None or part != self._loaded_for:
            self.close()
            self._loaded, self._loaded_for = self._load(self._requests(position, part)), part
        return next(self._loaded)

    def close(self) -> None:
        """End loading. A later call of :meth:`at` starts it anew."""
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = self._position = None


@dataclass(frozen=True, slots=True)
class ReaderReport:
    """The report of a reader, which all workers get before each step.

    Attributes:
        samples: the number of samples that it gives for the step.
        is_over: whether it has nothing left in this epoch.
    """

    number: int
    samples: int
    after: ReaderState
    is_over: bool


@dataclass(eq=False)
class StreamCourse:
    """The course over a stream. Reader v gives the samples of shard v; an exhausted reader gives an empty shard.

    ``promised`` is the number of samples that the stream says it has; None if it says nothing.
    """

    source: StreamSource
    readers: int
    together: Callable[[Callable[[Workers], Any]], Any]
    promised: int | None = None
    _batch: Batch | None = field(default=None, init=False)

    def ahead(self, progress: RunProgress, epochs: int, shape: BatchShape) -> NextStep | None:
        """Read the step that follows on ``progress``, and return it. A collective call."""
        while progress.position.epoch < epochs:
            if (step := self._read(progress, epochs, shape)) is not None:
                return step
            progress = _epoch_over(progress)
        return None

    def loader(self, part: Callable[[], Part], epochs: int, is_cut: Callable[[Position], bool]) -> StepLoader:
        """Return what gives the batches that were read."""
        return StreamLoader(self, part)

    def batches_over(self, progress: RunProgress, shape: BatchShape) -> int:
        """Return the number of batches of the present epoch that are over, by the reader that has come furthest."""
        counts = [stop - start for start, stop in pairwise(even_bounds(shape.samples, self.readers))]
        pairs = zip(progress.readers, counts, strict=False)
        return max((-(-state.samples // count) for state, count in pairs if count), default=0)

    def behind(self, position: Position, steps: int, epochs: int) -> Position:
        """Refuse: where steps of a stream end is known only when they are read."""
        if steps:
            raise DataError(
                f"run.steps(begin={steps}) of a stream: it would have to be read from its beginning. Go on from a "
                f"checkpoint of the run's own (unisono.init(checkpoints={{'every': …}})), which knows how far it was "
                "read"
            )
        return position

    def is_over(self, position: Position, epochs: int, shape: BatchShape) -> bool:
        """Whether no epoch is left. What is left of an epoch is known only when it is read."""
        return position.epoch >= epochs

    def has_passed(self, position: Position, epochs: int) -> bool:
        """Whether the loop has gone through the stream ``epochs`` times."""
        return position.epoch >= epochs

    def batches(self, shards: Sequence[int]) -> list[Any]:
        """Return the batches of some shards of the step that was read last."""
        assert self._batch is not None, "a step was read"
        return self.source.of(self._batch, shards)

    def _read(self, progress: RunProgress, epochs: int, shape: BatchShape) -> NextStep | None:
        position = progress.position
        states = progress.readers or (ReaderState(),) * self.readers
        if len(states) != self.readers:
            raise CheckpointError(
                f"the checkpoint holds {len(states)} readers of the stream, the job has {self.readers}"
            )
        if (samples := sum(state.samples for state in states)) != position.offset:
            raise CheckpointError(
                f"the checkpoint stands after {position.offset} samples of epoch {position.epoch}, and its readers of "
                f"the stream have given {samples}: it is damaged, or was written when the data were no stream. Go on "
                f"from another checkpoint, or start in a new folder"
            )
        reports = value_of(
            list[ReaderReport], self.together(partial(self._report, position.epoch, states, shape)), "readers' reports"
        )
        bounds = (0, *accumulate(report.samples for report in reports))
        if not bounds[-1]:
            if not position.offset and not position.epoch:
                raise DataError("the stream is empty: check the path, the split or the filter it was made with")
            return None
        is_last_in_epoch = all(report.is_over for report in reports)
        if not position.epoch and not position.offset:
            self._warn_of_empty(reports)
        start, stop = position.offset, position.offset + bounds[-1]
        self._batch = Batch(position.epoch, start, stop, bounds, is_last_in_epoch)
        self.source.begin(states)
        if is_last_in_epoch:
            warn_unless_promised(f"epoch {position.epoch} of the stream", stop, self.promised)
        moved = replace(position, step=position.step + 1, samples=position.samples + bounds[-1], offset=stop)
        after = replace(progress, position=moved, readers=tuple(report.after for report in reports))
        after = _epoch_over(after) if is_last_in_epoch else after
        return NextStep(position, self._batch, after, after.position.epoch >= epochs)

    def _warn_of_empty(self, reports: Sequence[ReaderReport]) -> None:
        empty = [reader.number for reader in reports if reader.is_over and not reader.samples]
        if empty:
            warn(
                f"{len(empty)} of the {self.readers} readers of the stream have nothing to read, number {empty[0]} "
                f"among them, and their shards are empty: batches are smaller by as much, and workers wait. Split the "
                f"stream into at least {self.readers} parts (files), one for each shard, or set fewer shards",
            )

    def _report(
        self, epoch: int, states: Sequence[ReaderState], shape: BatchShape, workers: Workers
    ) -> list[dict[str, Any]]:
        bounds, numbers = even_bounds(shape.samples, self.readers), workers.split(self.readers).of(workers.rank)
        wishes = [Wish(epoch, number, states[number], bounds[number + 1] - bounds[number]) for number in numbers]
        reports = []
        for result in self.source.read(wishes):
            after = {"samples": result.after.samples, "state": result.after.state}
            reports.append(
                {"number": result.number, "samples": result.samples, "after": after, "is_over": result.is_over}
            )
            workers.tick()
        return sorted(
            (report for of_worker in workers.gather_json(reports) for report in of_worker),
            key=lambda report: int(report["number"]),
        )


class StreamLoader:
    """Gives the batches of a stream's steps."""

    def __init__(self, course: StreamCourse, part: Callable[[], Part]) -> None:
        self._course, self._part = course, part
        self._loaded_at: tuple[Position, Part] | None = None
        self._batches: list[Any] = []

    def at(self, position: Position) -> list[Any]:
        """Return the batches of the shards that this worker has now, in the step that was read last."""
        part = self._part()
        if (position, part) != self._loaded_at:
            with generators_kept():  # the script's draws go on as if nothing had been loaded
                self._batches = self._course.batches(part[0])
            self._loaded_at = position, part
        return self._batches

    def close(self) -> None:
        """Close the readers. A later call of :meth:`at` returns what is read then."""
        self._loaded_at = None
        self._course.source.close()


def _epoch_over(progress: RunProgress) -> RunProgress:
    position = replace(progress.position, epoch=progress.position.epoch + 1, offset=0)
    return replace(progress, position=position, readers=())
