"""The course of a loop: which steps it has, and what is loaded for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

from unisono.adapt.view import BatchShape
from unisono.data.loader import Loaded
from unisono.data.shards import ShardsRequest
from unisono.data.streams import generators_kept
from unisono.plan.batches import Batch, Batches, Position
from unisono.train.state.state import RunProgress


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step that comes next.

    Attributes:
        position: the position at which it starts.
        batch: its samples.
        after: the place that the run has reached when it is committed.
        is_last: whether no step follows, as far as can be told.
    """

    position: Position
    batch: Batch
    after: RunProgress
    is_last: bool


class StepLoader(Protocol):
    """Loads step by step."""

    def at(self, position: Position) -> list[Any]:
        """The batches of the shards that this worker has now, in the step that starts at ``position``."""

    def close(self) -> None:
        """End what loads; whoever asks for a step again starts it anew."""


class Course(Protocol):
    """Which steps a loop has."""

    def ahead(self, progress: RunProgress, epochs: int, shape: BatchShape) -> NextStep | None:
        """The step behind some progress, with a batch of this shape; None if there is none.

        May be a collective call.
        """

    def loader(self, part: Callable[[], Part], epochs: int, is_cut: Callable[[Position], bool]) -> StepLoader:
        """What loads the steps.

        Args:
            part: what this worker computes now.
            epochs: passes over the data.
            is_cut: whether the loop is cut short at a position.
        """

    def batches_over(self, progress: RunProgress, shape: BatchShape) -> int:
        """The number of batches of the present epoch that are over, all of this shape."""

    def behind(self, position: Position, steps: int, epochs: int) -> Position:
        """Where so many steps from a position on are over, all of the loop's own batch size.

        Raises:
            DataError: that cannot be told.
        """

    def is_over(self, position: Position, epochs: int, shape: BatchShape) -> bool:
        """Whether nothing is left behind a position, as far as can be told. No collective call."""

    def has_passed(self, position: Position, epochs: int) -> bool:
        """Whether the job has used the data so many times."""


@dataclass(frozen=True, slots=True)
class CutCourse:
    """The course over data whose epochs are known beforehand.

    Attributes:
        batches: the batches of each epoch.
        load: a function that loads steps in their order.
    """

    batches: Batches
    load: Load

    def ahead(self, progress: RunProgress, epochs: int, shape: BatchShape) -> NextStep | None:
        """The step behind some progress, with a batch of this shape; None if there is none."""
        batches = self._shaped(shape)
        start = batches.next_from(progress.position, epochs)
        if start is None:
            return None
        batch = batches.at(start)
        after = replace(progress, position=batches.after(start, batch))
        return NextStep(start, batch, after, batches.next_from(after.position, epochs) is None)

    def loader(self, part: Callable[[], Part], epochs: int, is_cut: Callable[[Position], bool]) -> StepLoader:
        """What loads the steps, ahead of them."""
        return ShardLoader(self.load, partial(self.requests, epochs, is_cut), part)

    def requests(
        self, epochs: int, is_cut: Callable[[Position], bool], start: Position, part: Part
    ) -> Iterator[ShardsRequest]:
        """What a worker with these shards of batches of this shape reads in each step from ``start`` on."""
        shards, shape = part
        for position, batch in self._shaped(shape).remaining(start, epochs):
            if is_cut(position):
                return
            yield ShardsRequest(batch.epoch, tuple(batch.shard(shard) for shard in shards))

    def batches_over(self, progress: RunProgress, shape: BatchShape) -> int:
        """The number of batches of the present epoch that are over, all of this shape."""
        start, batch, cut = 0, 0, self._shaped(shape).of(progress.position.epoch)
        while start < progress.position.offset and (stop := cut.stop(start)) is not None:
            start, batch = stop, batch + 1
        return batch

    def behind(self, position: Position, steps: int, epochs: int) -> Position:
        """Where so many steps from a position on are over, or all that there are."""
        for start, batch in islice(self.batches.remaining(position, epochs), steps):
            position = self.batches.after(start, batch)
        return position

    def is_over(self, position: Position, epochs: int, shape: BatchShape) -> bool:
        """Whether no batch is left behind a position."""
        return self._shaped(shape).next_from(position, epochs) is None

    def has_passed(self, position: Position, epochs: int) -> bool:
        """Whether the job has used as many samples as so many passes over this data have."""
        return position.samples >= epochs * self.batches.of(0).used

    def _shaped(self, shape: BatchShape) -> Batches:
        return replace(self.batches, batch_size=shape.samples, shards=shape.shards)


Load = Callable[[Iterator[ShardsRequest]], Loaded]
"""From what each step needs to what it gets."""

Part = tuple[Sequence[int], BatchShape]
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
