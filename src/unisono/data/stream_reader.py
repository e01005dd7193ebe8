"""One reader of a stream: it gives the samples of one logical shard, whichever worker asks."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data._utils import worker

from unisono.data.refused import refused
from unisono.data.streams import seed_generators
from unisono.errors import DataError
from unisono.plan.order import Stream, stream_seed
from unisono.received import parse_json


class OpenedStream(NamedTuple):
    """A stream that is read.

    Attributes:
        iterator: the iterator over its samples.
        tell: a function that returns the state behind the last sample; None if nothing tells it. Then it is opened at
            the beginning, whatever state was given.
    """

    iterator: Any
    tell: Callable[[], Any] | None


def opens_readers(stream: Any) -> bool:
    """Whether a stream opens its readers itself."""
    return hasattr(stream, "open_reader")


def open_stream(stream: Any, number: int, readers: int, state: Any, *, keeps: bool) -> OpenedStream:
    """Open a stream for one of its readers.

    Args:
        stream: the stream; nobody else reads it.
        number: the number of the reader.
        readers: the number of readers.
        state: the state to go on from; None for the beginning.
        keeps: whether the states of streams that do not open their readers themselves are exact: their iterator's, or
            their own.
    """
    if opens_readers(stream):
        return _going_on(stream.open_reader(number, readers), state)
    iterator = iter(stream)
    if not keeps:
        return OpenedStream(iterator, None)
    if iterator is not stream and _tells(iterator):
        return _going_on(iterator, state)
    if not _tells(stream):
        return OpenedStream(iterator, None)
    if state is not None:
        stream.load_state_dict(state)
        iterator = iter(stream)
    return OpenedStream(iterator, stream.state_dict)


def _going_on(iterator: Any, state: Any) -> OpenedStream:
    if not _tells(iterator):
        return OpenedStream(iterator, None)
    if state is not None:
        iterator.load_state_dict(state)
    return OpenedStream(iterator, iterator.state_dict)


def _tells(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


@dataclass(frozen=True, slots=True)
class ReaderState:
    """How far a reader has come in an epoch.

    Attributes:
        samples: the number of samples that it has given.
        state: what the stream's reader has told of itself; None if it tells nothing.
    """

    samples: int = 0
    state: Any = None


@dataclass(frozen=True, slots=True)
class ReaderKey:
    """Which reader of which pass it is.

    Attributes:
        seed: the job's seed.
        loop: the number of the loop in the script.
        passes: the number of epochs that earlier loops of the script have asked the stream for.
        epoch: the number of the epoch in the loop.
        number: the number of the reader, which is that of its shard.
        readers: the number of readers.
    """

    seed: int
    loop: int
    passes: int
    epoch: int
    number: int
    readers: int

    def stream(self, sample: int, *, alike: bool) -> int:
        """The seed of what a sample draws.

        Args:
            sample: the number of the sample among those of the reader.
            alike: whether all readers draw alike: else they do so in their first sample alone, before which streams
                shuffle their files.
        """
        own = () if alike or not sample else (self.number,)
        return stream_seed(self.seed, Stream.READER, self.loop, self.epoch, sample, *own)


class _ReaderInfo:
    """What ``get_worker_info`` returns inside of a stream, and whether the stream has looked at it."""

    def __init__(self, number: int, readers: int, dataset: Any) -> None:
        self._number, self._readers = number, readers
        self.seed, self._dataset = number, dataset
        self.was_asked = self.was_counted = self.was_opened = False

    @property
    def dataset(self) -> Any:
        self.was_opened = True
        return self._dataset

    @property
    def id(self) -> int:
        self.was_asked = True
        return self._number

    @property
    def num_workers(self) -> int:
        self.was_asked = self.was_counted = True
        return self._readers


class Reader:
    """A reader of a copy of the stream.

    A stream with ``open_reader(number, readers)`` gives the reader itself. Any other one finds the reader's number in
    ``torch.utils.data.get_worker_info()``, as in a loader process of torch; one that does not look is read by every
    reader, of which each takes every so many-th sample.

    Args:
        stream: the stream.
        key: the key of the reader.
        at: the state behind which it is to go on.
        begin: a function that is called with the reader's number before its copy of the stream is opened, as a loader
            process of torch calls ``worker_init_fn``. One that looks how many there are has split the copy.
        keeps: whether the states that streams tell of themselves are used; see
            :func:`~unisono.data.stream_reader.open_stream`.

    Raises:
        DataError: the stream cannot be copied, or has become shorter than it was.

    Attributes:
        at: the state that it has reached.
        is_over: whether nothing is left.
    """

    def __init__(
        self,
        stream: Any,
        key: ReaderKey,
        at: ReaderState,
        begin: Callable[[int], None] | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self._key, self._stream = key, _copied(stream)
        self._read, self._step = 0, 1
        self._info = _ReaderInfo(key.number, key.readers, self._stream)
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(key.passes + key.epoch)
        seed_generators(key.stream(0, alike=True))
        if begin is not None:
            with self._inside():
                begin(key.number)
            self._info.was_asked = self._info.was_counted
            if self._info.was_opened and not self._info.was_asked:
                raise DataError(refused("stream.begun-unsplit"))
            seed_generators(key.stream(0, alike=True))
        with self._inside():
            opened = open_stream(self._stream, key.number, key.readers, at.state, keeps=keeps)
        self._iterator, self._tell = opened
        self._ahead: list[Any] = []
        self.at, self.is_over = ReaderState(), False
        if at.state is not None and self._tell is not None:
            self._read, self.at = at.samples, at
        self._look_ahead()
        if not opens_readers(stream) and not self._info.was_asked:
            self._share(key)
        if skipped := at.samples - self.at.samples:
            self._skip(skipped)

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer where the stream ends."""
        found: list[Any] = []
        while len(found) < count and not self.is_over:
            found.append(self._ahead.pop())
            samples = self.at.samples + 1
            self.at = self._state(samples) if len(found) == count else ReaderState(samples)
            self._pass_over(self._step - 1)
            self._look_ahead()
        return found

    def _share(self, key: ReaderKey) -> None:
        """Take every so many-th sample of a stream that all readers read."""
        self._step, others = key.readers, key.number
        if self.at.samples:  # it goes on from a state, right behind a sample of this reader
            others = key.readers - 1
            self._read = key.number + (self.at.samples - 1) * key.readers + 2
        self._pass_over(others)
        self._look_ahead()

    def _state(self, samples: int) -> ReaderState:
        """The state behind so many samples, before the stream is asked for another one."""
        if self._tell is None:
            return ReaderState(samples)
        told, teller = self._tell(), type(getattr(self._tell, "__self__", self._iterator)).__name__
        try:
            return ReaderState(samples, parse_json(json.dumps(told)))
        except (TypeError, ValueError) as error:
            raise DataError(refused("stream.state-no-json", name=teller, error=error)) from error

    def _skip(self, samples: int) -> None:
        if len(self.take(samples)) < samples:
            raise DataError(
                refused(
                    "stream.shorter",
                    reader=self._key.number,
                    name=type(self._stream).__name__,
                    now=self.at.samples,
                    epoch=self._key.epoch,
                    before=samples,
                )
            )

    def _look_ahead(self) -> None:
        """Read one sample more than was asked for: only so is it known whether there is one."""
        if self._ahead or self.is_over:
            return
        try:
            self._ahead.append(self._next())
        except StopIteration:
            self.is_over = True

    def _pass_over(self, samples: int) -> None:
        for _ in range(samples):
            self._look_ahead()
            self._ahead.clear()

    def _next(self) -> Any:
        seed_generators(self._key.stream(self._read, alike=self._step > 1))
        with self._inside():
            try:
                found = next(self._iterator)
            except Exception as error:
                if not isinstance(error, StopIteration):
                    error.add_note(
                        f"(while reader {self._key.number} of {type(self._stream).__name__} was asked for number "
                        f"{self._read} of what it reads in epoch {self._key.epoch})"
                    )
                raise
        self._read += 1
        return found

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before = worker._worker_info
        worker._worker_info = self._info  # type: ignore[assignment]
        try:
            yield
        finally:
            worker._worker_info = before


def _copied(stream: Any) -> Any:
    try:
        return deepcopy(stream)
    except Exception as error:
        raise DataError(refused("stream.not-copied", name=type(stream).__name__, error=error)) from error
