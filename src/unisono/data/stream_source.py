"""A stream as one worker reads it: the readers of its shards, and what each of them has given."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from unisono.data.sampler_order import LoopKey
from unisono.data.shards import Collate, one_thread
from unisono.data.stream_reader import Reader, ReaderKey, ReaderState
from unisono.data.streams import seed_generators
from unisono.errors import DataError
from unisono.plan.batches import Batch
from unisono.plan.order import Stream, stream_seed


@dataclass(frozen=True, slots=True)
class Given:
    """What a reader has given for one step.

    Attributes:
        samples: the samples; fewer than asked for, or none, where the stream ends.
        before: the state of the reader before.
        after: its state now.
        is_over: whether nothing is left.
    """

    samples: Sequence[Any]
    before: ReaderState
    after: ReaderState
    is_over: bool


class StreamSource:
    """Gives the samples of any shard at any place of the stream, and fast where it has read just before it.

    Args:
        stream: the stream.
        key: what the draws of its samples follow from.
        readers: the number of readers, one for each shard of the job.
        collate: a function that makes a batch of a list of samples; None for torch's ``default_collate``.
        keeps: whether the states that streams tell of themselves are used.
    """

    def __init__(
        self, stream: Any, key: LoopKey, readers: int, collate: Collate | None = None, *, keeps: bool = False
    ) -> None:
        self._stream, self._key, self._readers, self._keeps = stream, key, readers, keeps
        self._is_known = False  # whether it was read twice, and gave the same
        self._collate = collate or default_collate
        self._open: dict[int, tuple[int, Reader]] = {}
        self._given: dict[int, tuple[int, Given]] = {}
        self._begun: tuple[ReaderState, ...] = ()
        self._batches: dict[int, Any] = {}

    def give(self, epoch: int, number: int, at: ReaderState, count: int) -> Given:
        """What a reader gives for a step.

        Args:
            epoch: the number of the epoch.
            number: the number of the reader.
            at: the state that it has reached.
            count: the number of samples to read; fewer are given where the stream ends.

        Raises:
            DataError: it no longer gives what it has given.
        """
        known, given = self._given.get(number, (-1, None))
        if (
            given is not None
            and (known, given.before) == (epoch, at)
            and (len(given.samples) == count or (given.is_over and len(given.samples) < count))
        ):
            return given
        opened, reader = self._open.get(number, (-1, None))
        with one_thread():
            if reader is None or (opened, reader.at) != (epoch, at):
                reader = self._reader(epoch, number, at)
                self._open[number] = epoch, reader
            given = Given(reader.take(count), at, reader.at, reader.is_over)
            if not number and not at.samples:
                self._require_same(epoch, given)
        self._given[number] = epoch, given
        return given

    def begin(self, states: tuple[ReaderState, ...]) -> None:
        """A step begins: its batch starts where these states are."""
        self._begun, self._batches = states, {}

    def close_but(self, mine: range) -> None:
        """Close the readers of other workers' shards."""
        for number in set(self._open) - set(mine):
            del self._open[number], self._given[number]

    def of(self, batch: Batch, shards: Iterable[int]) -> list[Any]:
        """The batches of some shards of the step that has begun; None for an empty one.

        Raises:
            DataError: a stream no longer gives what it has given, or samples cannot be collated.
        """
        return [self._shard(batch, number) for number in shards]

    def mark(self, batch: Batch) -> int:
        """Nobody else reads these samples."""
        return 0

    def _reader(self, epoch: int, number: int, at: ReaderState) -> Reader:
        key = self._key
        numbered = ReaderKey(key.seed, key.loop, key.passes, epoch, number, self._readers)
        return Reader(self._stream, numbered, at, keeps=self._keeps)

    def _require_same(self, epoch: int, given: Given) -> None:
        """Read the first samples twice, once in a loop: what comes by chance is other then.

        Where the stream tells a state, go on from it, too: what comes next has to be the same.
        """
        if self._is_known:
            return
        reader, count = self._reader(epoch, 0, ReaderState()), len(given.samples)
        if not alike(reader.take(count), list(given.samples)):
            raise DataError(
                f"{type(self._stream).__name__} gave other samples when it was read a second time from the beginning, "
                f"and so it would to a worker that joins and to a run that resumes: seed what it shuffles or draws "
                f"with, or draw from the global generators of torch, NumPy and Python, which are seeded before"
            )
        if reader.at.state is not None and not self._goes_on(epoch, reader, count):
            raise DataError(
                f"{type(self._stream).__name__} does not go on from the state that it told with the samples that come "
                f"next without it, so a run that resumes would lose or repeat some. Shuffle buffers are left out of "
                f"states, for one: give run.steps the stream itself, or in a DataLoader of torch, whose readers read "
                f"again up to their place"
            )
        self._is_known = True

    def _goes_on(self, epoch: int, reader: Reader, count: int) -> bool:
        """Whether a reader that begins at another one's state gives the same as that."""
        try:
            resumed = self._reader(epoch, 0, reader.at).take(count)
        except Exception:  # noqa: BLE001 (whatever it is, it cannot go on)
            return False
        return alike(resumed, reader.take(count))

    def _shard(self, batch: Batch, number: int) -> Any:
        if not (count := len(batch.shard(number))):
            return None
        given = self.give(batch.epoch, number, self._begun[number], count)
        if len(given.samples) != count:
            raise DataError(
                f"reader {number} of {type(self._stream).__name__} gave {len(given.samples)} samples here, and {count} "
                f"on another worker: a stream has to give the same samples wherever it is read"
            )
        if number not in self._batches:
            key = self._key.loop, batch.epoch, number, given.before.samples
            with one_thread():
                seed_generators(stream_seed(self._key.seed, Stream.COLLATE, *key))
                self._batches[number] = self._collate(list(given.samples))
        return self._batches[number]


def alike(one: Any, other: Any) -> bool:
    """Whether two samples hold the same: tensors, arrays, numbers, text and bytes, in lists, tuples and mappings.

    Of other things only the type is compared.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and bool(((one == other) | ((one != one) & (other != other))).all())
        )
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(alike(*pair) for pair in zip(one, other, strict=True))
    return not isinstance(one, int | float | str | bytes) or bool(one == other or (one != one and other != other))
