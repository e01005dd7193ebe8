"""Streams that come in whole batches: every worker reads all of them, and takes the parts of its shards."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from torch import Tensor

from unisono.data.refusals import refused
from unisono.data.slots import replaced
from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import ReaderOutput, Readers, Wish
from unisono.errors import DataError
from unisono.plan.split import even_bounds
from unisono.received import value_of
from unisono.words import bytes_of


class BatchStream(Protocol):
    """A stream whose batches are made already.

    Attributes:
        origin: the object by which passes over it are counted.
        cure: what to do if it does not give the same batches each time, for messages.
    """

    origin: Any
    name: str
    cure: str

    def open_batches(self, number: int) -> Iterator[Any]:
        """Open a pass of the stream, from the beginning: the same batches on every worker and in every call.

        Returns:
            tensors in lists, tuples and dicts, with one row for each sample.
        """


def gives_batches(stream: Any) -> bool:
    """Whether it is a stream of batches."""
    return hasattr(stream, "open_batches")


class StreamBatch(NamedTuple):
    """A batch of such a stream. ``digest`` tells it from others: a number below 2**32."""

    value: Any
    samples: int
    digest: int

    @classmethod
    def of(cls, value: Any, name: str) -> "StreamBatch":
        """Check a value that a stream has given.

        Raises:
            DataError: it is no batch.
        """
        tensors: list[Tensor] = []
        replaced(value, Tensor, tensors.append)
        rows = {len(tensor) if tensor.dim() else None for tensor in tensors}
        if len(rows) != 1 or None in rows:
            shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors) or "no arrays"
            raise DataError(refused("batches.uneven", name=name, shapes=shapes))
        digest = 0
        for tensor in tensors:
            digest = crc32(bytes_of(tensor.contiguous()).data, digest)
        return cls(value, next(len(tensor) for tensor in tensors), digest)

    def part(self, rows: slice) -> Any:
        """Some of its samples."""
        return replaced(self.value, Tensor, lambda tensor: tensor[rows])


NEWEST = 4
"""The batches of a pass that are kept: a step is computed again if a worker is lost, and need not be read again."""


class OpenPass:
    """A pass over such a stream, read one batch ahead: only so is it known whether there is one.

    Attributes:
        done: the number of batches before the present one.
    """

    def __init__(self, stream: BatchStream, number: int) -> None:
        self._name, self._iterator = stream.name, stream.open_batches(number)
        self.done = self._first = 0  # the number of the first one that is kept
        self._kept: deque[StreamBatch | None] = deque([self._next()])
        self._read_ahead()

    @property
    def batch(self) -> StreamBatch | None:
        """The present batch; None behind the last one."""
        return self._kept[self.done - self._first]

    @property
    def before(self) -> int | None:
        """The digest of the batch before the present one; None at the beginning."""
        earlier = self._kept[self.done - self._first - 1] if self.done else None
        return None if earlier is None else earlier.digest

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the present batch."""
        return self.batch is None or self._kept[self.done - self._first + 1] is None

    def can_go_to(self, done: int) -> bool:
        """Whether the batch behind so many is there, or yet to come."""
        return done >= self._first + bool(self._first)  # with the one before it

    def go_to(self, done: int) -> None:
        """Go to the batch behind so many, or to the end."""
        while self.done < done and self.batch is not None:
            self.go_on()
        self.done = min(self.done, done)

    def go_on(self) -> None:
        """Go to the next batch."""
        assert self.batch is not None, "there is one more"
        self.done += 1
        self._read_ahead()

    def _read_ahead(self) -> None:
        if self.batch is not None and len(self._kept) == self.done - self._first + 1:
            self._kept.append(self._next())
        if self.done - self._first > NEWEST:
            self._kept.popleft()
            self._first += 1

    def _next(self) -> StreamBatch | None:
        try:
            batch = next(self._iterator, None)
        except Exception as error:
            error.add_note(f"(while a batch of {self._name} was read, behind {self.done})")
            raise
        return None if batch is None else StreamBatch.of(batch, self._name)


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """The state of a reader. ``digest`` is that of the last batch that is over."""

    batches: int
    digest: int


class BatchReaders(Readers):
    """Readers that share the stream's batches: reader v gives the part of shard v of each.

    Args:
        passes: the number of passes that earlier loops of the script have asked it for.
        begun: the first of its passes, at its first batch.
    """

    def __init__(self, stream: BatchStream, passes: int, readers: int, begun: OpenPass) -> None:
        assert begun.batch is not None, "it has one"
        self._stream, self._passes, self._readers, self._first = stream, passes, readers, begun.batch.digest
        self._open: tuple[int, OpenPass] | None = (0, begun)

    def expect(self, wishes: Sequence[Wish]) -> None:
        """Whichever readers these are: all of them share one pass."""

    def give(self, wish: Wish) -> ReaderOutput:
        """Return a reader's part of the batch, whatever number of samples the wish names."""
        here = self._at(wish)
        if here.batch is None:
            return ReaderOutput(wish.epoch, wish.number, 0, wish.at, wish.at, is_over=True)
        samples = len(self._rows(here.batch, wish.number))
        place = {"batches": here.done + 1, "digest": here.batch.digest}
        after = ReaderState(wish.at.samples + samples, place)
        return ReaderOutput(wish.epoch, wish.number, samples, wish.at, after, here.is_last)

    def batch(self, wish: Wish) -> Any:
        """Return a reader's part of the batch, collated."""
        here = self._at(wish).batch
        rows = range(0) if here is None else self._rows(here, wish.number)
        return here.part(slice(rows.start, rows.stop)) if here is not None and rows else None

    def mark(self) -> int:
        """The digest of the batch of the step that was read last."""
        here = None if self._open is None else self._open[1].batch
        return 0 if here is None else here.digest

    def close(self) -> None:
        """Let go of the pass; a later call begins a pass anew."""
        self._open = None

    def _at(self, wish: Wish) -> OpenPass:
        """The pass, at the batch that comes next for a reader."""
        state = wish.at.state
        place = None if state is None else value_of(BatchPlace, state, f"the place of reader {wish.number}")
        done = 0 if place is None else place.batches
        epoch, here = self._open or (-1, None)
        if here is None or epoch != wish.epoch or not here.can_go_to(done):
            here = OpenPass(self._stream, self._passes + wish.epoch)
            self._open = wish.epoch, here
            if not wish.epoch and here.batch is not None and here.batch.digest != self._first:
                raise self._unlike("gave another first batch when it was read again from the beginning")
        here.go_to(done)
        if place is not None and (here.done, here.before) != (done, place.digest):
            raise self._unlike(f"gave other batches before, when epoch {wish.epoch} was read up to number {done}")
        return here

    def _rows(self, batch: StreamBatch, number: int) -> range:
        bounds = even_bounds(batch.samples, self._readers)
        return range(bounds[number], bounds[number + 1])

    def _unlike(self, difference: str) -> DataError:
        return DataError(
            f"{self._stream.name} {difference}. It has to give the same batches on all workers, to one that joins and "
            f"to a run that resumes: {self._stream.cure}"
        )
