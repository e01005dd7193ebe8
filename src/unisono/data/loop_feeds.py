"""What the loops of a script read, one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset

from unisono.data.batch_stream import BatchReaders, OpenPass, gives_batches
from unisono.data.content import Glance
from unisono.data.feed import Asked, Feed, refuse_beside
from unisono.data.order import KeyedOrder, Order
from unisono.data.sampler_order import LoopKey
from unisono.data.stream_feed import StreamFeed
from unisono.data.stream_source import StreamSource
from unisono.errors import DataError


@dataclass(frozen=True, slots=True)
class StreamOrder(KeyedOrder):
    """The order in which the samples of such a stream are counted: as they are read.

    Attributes:
        first: the digest of its first batch.
    """

    first: int = 0

    @property
    def digest(self) -> str:
        """That of the first batch."""
        return f"{self.first:08x}"


@dataclass(frozen=True)
class BatchFeed(StreamFeed):
    """What is read of a stream of batches.

    Attributes:
        begun: the first of its passes, at its first batch; None in evaluations.
    """

    begun: OpenPass | None = None

    is_batched: ClassVar[bool] = True  # the stream decides which samples a batch has

    @property
    def order(self) -> Order:
        """The order in which samples are counted."""
        batch = None if self.begun is None else self.begun.batch
        return StreamOrder(0, self.key.seed, first=0 if batch is None else batch.digest)

    promised: ClassVar[int | None] = None  # it says nothing of samples

    @classmethod
    def of_batches(cls, data: Any, asked: Asked, key: LoopKey, epochs: int = 1) -> "BatchFeed | None":
        """Take a stream of batches; None if data are something else.

        Args:
            data: the data, as a script gives them.
            asked: what the script asks for beside them.
            key: what the order follows from.
            epochs: the number of epochs to read.

        Raises:
            DataError: it has no batches.
            JobError: something is asked for that the stream decides.
        """
        if not gives_batches(data):
            return None
        refuse_beside(asked, f"beside {data.name}: it makes its batches itself, so say it there")
        if key.is_evaluation:
            return cls(data, key)
        begun = OpenPass(data, key.passes)
        if begun.batch is None:
            raise DataError(f"{data.name} has no batches: check the path, the split or the filter it was made with")
        return cls(data, key, begun.batch.samples, epochs=epochs, begun=begun)

    def same(self) -> Mapping[str, Any]:
        """What has to be the same on all workers."""
        return {"kind of stream": self.stream.name} | (
            {} if self.begun is None else {f"first batch ({self.stream.cure})": self.order.digest}
        )

    def content(self, look: Glance) -> str:
        """Nothing: the first batch is compared, and each further one as it is read."""
        return ""

    def source(self, readers: int) -> StreamSource:
        """What gives the samples, read by so many readers."""
        assert self.begun is not None, "it is read in a loop"
        shared = BatchReaders(self.stream, self.key.passes, readers, self.begun)
        return StreamSource(shared, self.stream.name, self.stream.cure)


class LoopFeeds:
    """The feeds of a script's loops, one after the other.

    Args:
        seed: the job's seed.
        timeout_s: seconds after which a loader process is taken to hang.
    """

    def __init__(self, seed: int, timeout_s: float) -> None:
        self._seed, self._timeout_s = seed, timeout_s
        self._passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def of(self, data: Any, asked: Asked, loop: int, epochs: int) -> Feed | StreamFeed:
        """What a loop reads; see :meth:`Feed.of`.

        A loader that had loops before goes on behind all of their epochs, whether or not they came to their end:
        whoever has skipped them knows no more of them than how many were asked for.
        """
        passes = 0
        if isinstance(data, DataLoader | IterableDataset) or gives_batches(data):
            origin = data.origin if gives_batches(data) else data
            passes = self._passes.get(origin, 0)
            self._passes[origin] = passes + epochs
        return feed_of(data, asked, LoopKey(self._seed, loop, passes), self._timeout_s, epochs)


def feed_of(data: Any, asked: Asked, key: LoopKey, timeout_s: float, epochs: int = 1) -> Feed | StreamFeed:
    """What a loop or an evaluation reads; see :meth:`Feed.of`. Loops shuffle data sets unless the script says other."""
    stream = BatchFeed.of_batches(data, asked, key, epochs) or StreamFeed.of(data, asked, key, timeout_s, epochs)
    if stream is not None:
        return stream
    if not isinstance(data, DataLoader) and asked.shuffle is None and not key.is_evaluation:
        asked = replace(asked, shuffle=True)
    return Feed.of(data, asked, key, timeout_s)
