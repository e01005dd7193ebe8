"""The readers of a stream that one process has open, and what each of them gives for a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from unisono.data.refused import refused
from unisono.data.sampler_order import LoopKey
from unisono.data.shards import Collate, alike, collated, one_thread
from unisono.data.stream_reader import Reader, ReaderKey, ReaderState
from unisono.data.streams import seed_generators
from unisono.errors import DataError
from unisono.plan.order import Stream, stream_seed


class Wish(NamedTuple):
    """What a reader is asked for.

    Attributes:
        epoch: the number of the epoch.
        number: the number of the reader.
        at: the state that it has reached.
        samples: the number of samples; fewer are given where the stream ends.
    """

    epoch: int
    number: int
    at: ReaderState
    samples: int


class Given(NamedTuple):
    """What a reader gives.

    Attributes:
        epoch: the number of the epoch.
        number: the number of the reader.
        samples: the number of samples; fewer than asked for, or none, where the stream ends.
        before: the state of the reader before.
        after: its state then.
        is_over: whether nothing is left.
    """

    epoch: int
    number: int
    samples: int
    before: ReaderState
    after: ReaderState
    is_over: bool

    def fulfils(self, wish: Wish) -> bool:
        """Whether it is what was asked for."""
        is_enough = self.samples == wish.samples or (self.is_over and self.samples < wish.samples)
        return (self.epoch, self.number, self.before) == wish[:3] and is_enough


class Readers(Protocol):
    """Readers of a stream, some of which are open."""

    def expect(self, wishes: Sequence[Wish]) -> None:
        """This is what this worker needs next. Readers of other numbers are closed."""

    def give(self, wish: Wish) -> Given:
        """What a reader gives. Fast where it has just read before that, or given that.

        Raises:
            DataError: it no longer gives what it has given.
        """

    def batch(self, wish: Wish) -> Any:
        """The same, collated; None where it gives nothing.

        Raises:
            DataError: it no longer gives what it has given, or samples cannot be collated.
        """

    def mark(self) -> int:
        """A number below 2**32 that tells what all workers read alike for a step; 0 where each reads its own."""

    def close(self) -> None:
        """Close all readers; whoever asks again opens them anew."""


@dataclass(slots=True)
class _Newest:
    """What a reader has given last, and the batch of it once it was asked for."""

    given: Given
    samples: Sequence[Any]
    batch: Any = None


class OpenReaders:
    """Readers in this process.

    Args:
        stream: the stream.
        key: what the draws of its samples follow from.
        readers: the number of readers, one for each shard of the job.
        collate: a function that makes a batch of a list of samples; None for torch's ``default_collate``.
        begin: a function that each reader calls with its number before it opens its copy of the stream.
        keeps: whether the states that streams tell of themselves are used.
    """

    def __init__(
        self,
        stream: Any,
        key: LoopKey,
        readers: int,
        collate: Collate | None = None,
        begin: Callable[[int], None] | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self._stream, self._key, self._readers, self._begin, self._keeps = stream, key, readers, begin, keeps
        self._is_known = False  # whether it was read twice, and gave the same
        self._collate = collate
        self._open: dict[int, tuple[int, Reader]] = {}
        self._newest: dict[int, _Newest] = {}

    def expect(self, wishes: Sequence[Wish]) -> None:
        """Close readers of other numbers."""
        for number in {*self._open, *self._newest} - {wish.number for wish in wishes}:
            self._open.pop(number, None)
            self._newest.pop(number, None)

    def give(self, wish: Wish) -> Given:
        """What a reader gives; see :class:`Readers`."""
        return self._read(wish).given

    def batch(self, wish: Wish) -> Any:
        """The same, collated; see :class:`Readers`."""
        newest = self._read(wish)
        if newest.batch is None and newest.samples:
            key = self._key.loop, wish.epoch, wish.number, wish.at.samples
            with one_thread():
                seed_generators(stream_seed(self._key.seed, Stream.COLLATE, *key))
                numbers = range(wish.at.samples, wish.at.samples + len(newest.samples))
                whose = f"reader {wish.number} of {type(self._stream).__name__} in epoch {wish.epoch}"
                newest.batch = collated(self._collate, list(newest.samples), numbers, whose)
        return newest.batch

    def mark(self) -> int:
        """No other worker reads the same."""
        return 0

    def close(self) -> None:
        """Close all readers."""
        self.expect(())

    def _read(self, wish: Wish) -> _Newest:
        newest = self._newest.get(wish.number)
        if newest is not None and newest.given.fulfils(wish):
            return newest
        epoch, reader = self._open.get(wish.number, (-1, None))
        with one_thread():
            if reader is None or (epoch, reader.at) != (wish.epoch, wish.at):
                reader = self._reader(wish)
                self._open[wish.number] = wish.epoch, reader
            samples = reader.take(wish.samples)
            given = Given(wish.epoch, wish.number, len(samples), wish.at, reader.at, reader.is_over)
            if not wish.number and not wish.at.samples:
                self._require_same(wish, samples)
        newest = self._newest[wish.number] = _Newest(given, samples)
        return newest

    def _reader(self, wish: Wish) -> Reader:
        key = self._key
        numbered = ReaderKey(key.seed, key.loop, key.passes, wish.epoch, wish.number, self._readers)
        return Reader(self._stream, numbered, wish.at, self._begin, keeps=self._keeps)

    def _require_same(self, wish: Wish, samples: Sequence[Any]) -> None:
        """Read the first samples twice, once in a loop: what comes by chance is other then.

        Where the stream tells a state, go on from it, too: what comes next has to be the same.
        """
        if self._is_known:
            return
        reader, count = self._reader(wish), len(samples)
        if not alike(reader.take(count), list(samples)):
            raise DataError(refused("stream.not-repeated", name=type(self._stream).__name__))
        if reader.at.state is not None and not self._goes_on(wish, reader, count):
            raise DataError(refused("stream.state-inexact", name=type(self._stream).__name__))
        self._is_known = True

    def _goes_on(self, wish: Wish, reader: Reader, count: int) -> bool:
        """Whether a reader that begins at another one's state gives the same as that."""
        try:
            resumed = self._reader(wish._replace(at=reader.at)).take(count)
        except Exception:  # noqa: BLE001 (whatever it is, it cannot go on)
            return False
        return alike(resumed, reader.take(count))
