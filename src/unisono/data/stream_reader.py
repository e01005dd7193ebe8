"""A reader of a stream: it gives the samples of one shard, whichever worker computes that shard."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data._utils import worker

from unisono.data.generators import seed_generators
from unisono.data.refusals import refused
from unisono.errors import DataError
from unisono.plan.order import Stream, stream_seed
from unisono.received import parse_json


class OpenedStream(NamedTuple):
    """A stream that is read.

    Attributes:
        get_state: a function that returns the state behind the last sample; None if there is none. Then it is opened at
            the beginning, whatever state was given.
    """

    iterator: Any
    get_state: Callable[[], Any] | None


def opens_readers(stream: Any) -> bool:
    """Whether a stream opens its readers itself."""
    return hasattr(stream, "open_reader")


def open_stream(stream: Any, number: int, readers: int, state: Any, *, keeps: bool) -> OpenedStream:
    """Open a stream for one of its readers.

    Nobody else reads the stream. ``state`` is None for the beginning. ``keeps`` says whether the states of streams that
    do not open their readers themselves are exact: their iterator's, or their own.
    """
    opens = opens_readers(stream)
    iterator = stream.open_reader(number, readers) if opens else iter(stream)
    if (opens or (keeps and iterator is not stream)) and _has_state(iterator):
        if state is not None:
            iterator.load_state_dict(state)
        return OpenedStream(iterator, iterator.state_dict)
    if opens or not keeps or not _has_state(stream):
        return OpenedStream(iterator, None)
    if state is not None:
        stream.load_state_dict(state)
        iterator = iter(stream)
    return OpenedStream(iterator, stream.state_dict)


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


@dataclass(frozen=True, slots=True)
class ReaderState:
    """The place that a reader has reached in an epoch.

    ``state`` is what the stream's reader has returned; None if it has none.
    """

    samples: int = 0
    state: Any = None


@dataclass(frozen=True, slots=True)
class ReaderKey:
    """The key of a reader of a pass.

    Attributes:
        passes: the number of epochs that earlier loops of the script have asked the stream for.
        number: the number of the reader, which is that of its shard.
    """

    seed: int
    loop: int
    passes: int
    epoch: int
    number: int
    readers: int

    def stream(self, sample: int, *, alike: bool) -> int:
        """The seed of a sample's draws.

        ``sample`` is counted among those of the reader. Unless all readers draw ``alike``, they do so in their first
        sample alone, before which streams shuffle their files.
        """
        own = () if alike or not sample else (self.number,)
        return stream_seed(self.seed, Stream.READER, self.loop, self.epoch, sample, *own)


class _ReaderInfo:
    """The result of ``get_worker_info`` inside of a stream, and whether the stream has used it."""

    def __init__(self, number: int, readers: int, dataset: Any) -> None:
        self._number, self._readers = number, readers
        self.seed, self._dataset = number, dataset
        self.was_used = self.was_counted = self.was_opened = False

    @property
    def dataset(self) -> Any:
        self.was_opened = True
        return self._dataset

    @property
    def id(self) -> int:
        self.was_used = True
        return self._number

    @property
    def num_workers(self) -> int:
        self.was_used = self.was_counted = True
        return self._readers


class Reader:
    """A reader of a copy of the stream.

    A stream with ``open_reader(number, readers)`` gives the reader itself. Any other one finds the reader's number in
    ``torch.utils.data.get_worker_info()``, as in a loader process of torch; one that does not look is read by every
    reader, of which each takes every so many-th sample.

    Args:
        at: the state behind which it is to go on.
        begin: a function that is called with the reader's number before its copy of the stream is opened, as a loader
            process of torch calls ``worker_init_fn``. One that looks how many there are has split the copy.
        keeps: whether the states that streams tell of themselves are used; see
            :func:`~unisono.data.stream_reader.open_stream`.

    Raises:
        DataError: the stream cannot be copied, or has become shorter than it was.
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
            self._info.was_used = self._info.was_counted
            if self._info.was_opened and not self._info.was_used:
                raise DataError(refused("stream.begun-unsplit"))
            seed_generators(key.stream(0, alike=True))
        with self._inside():
            opened = open_stream(self._stream, key.number, key.readers, at.state, keeps=keeps)
        self._iterator, self._get_state = opened
        self._ahead: list[Any] = []
        self.at, self.is_over = ReaderState(), False
        if at.state is not None and self._get_state is not None:
            self._read, self.at = at.samples, at
        self._look_ahead()
        if not opens_readers(stream) and not self._info.was_used:
            self._share(key)
        if skipped := at.samples - self.at.samples:
            self._skip(skipped)

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer where the stream ends."""
        samples: list[Any] = []
        while len(samples) < count and not self.is_over:
            samples.append(self._ahead.pop())
            given = self.at.samples + 1
            self.at = self._state(given) if len(samples) == count else ReaderState(given)
            self._pass_over(self._step - 1)
            self._look_ahead()
        return samples

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
        if self._get_state is None:
            return ReaderState(samples)
        state, kind = self._get_state(), type(getattr(self._get_state, "__self__", self._iterator)).__name__
        try:
            return ReaderState(samples, parse_json(json.dumps(state)))
        except (TypeError, ValueError) as error:
            raise DataError(refused("stream.state-no-json", name=kind, error=error)) from error

    def _skip(self, samples: int) -> None:
        if len(self.take(samples)) < samples:
            reader, name, now, epoch = self._key.number, type(self._stream).__name__, self.at.samples, self._key.epoch
            why = refused("stream.shorter", reader=reader, name=name, now=now, epoch=epoch, before=samples)
            raise DataError(why)

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
                sample = next(self._iterator)
            except StopIteration:
                raise
            except Exception as error:
                error.add_note(
                    f"(while reader {self._key.number} of {type(self._stream).__name__} was asked for number "
                    f"{self._read} of what it reads in epoch {self._key.epoch})"
                )
                raise
        self._read += 1
        return sample

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
