"""A stream as one worker reads it, step by step."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from unisono.data.stream_reader import ReaderState
from unisono.data.stream_readers import Given, Readers, Wish
from unisono.errors import DataError
from unisono.plan.batches import Batch


class StreamSource:
    """Gives the samples of any shard of the step that has begun.

    Args:
        readers: the readers, one for each shard of the job.
        name: the name of the stream's kind.
        cure: what to do if workers read different samples where they are to read the same, for messages.

    Attributes:
        unlike: why workers may have different samples in a step, and what to do, for messages.
    """

    def __init__(self, readers: Readers, name: str, cure: str = "") -> None:
        self._readers, self._name = readers, name
        self.unlike = f"All read the same batches of {name}: {cure}"
        self._begun: tuple[ReaderState, ...] = ()

    def read(self, wishes: Sequence[Wish]) -> Iterator[Given]:
        """What this worker's readers give for a step."""
        self._readers.expect(wishes)
        yield from map(self._readers.give, wishes)

    def begin(self, states: tuple[ReaderState, ...]) -> None:
        """A step begins: its batch starts where these states are."""
        self._begun = states

    def batch(self, wish: Wish) -> Any:
        """What one reader gives, collated; see :meth:`Readers.batch`."""
        return self._readers.batch(wish)

    def of(self, batch: Batch, shards: Iterable[int]) -> list[Any]:
        """The batches of some shards of the step that has begun; None for an empty one.

        Raises:
            DataError: a stream no longer gives what it has given, or samples cannot be collated.
        """
        return [self._shard(batch, number) for number in shards]

    def mark(self, batch: Batch) -> int:
        """What tells the samples of a step that all workers read; 0 where nobody else reads these samples."""
        return self._readers.mark()

    def close(self) -> None:
        """Close the readers; whoever reads again opens them anew."""
        self._readers.close()

    def _shard(self, batch: Batch, number: int) -> Any:
        if not (count := len(batch.shard(number))):
            return None
        wish = Wish(batch.epoch, number, self._begun[number], count)
        if (given := self._readers.give(wish).samples) != count:
            raise DataError(
                f"reader {number} of {self._name} gave {given} samples here, and {count} on another worker: a stream "
                f"has to give the same samples wherever it is read"
            )
        return self._readers.batch(wish)
