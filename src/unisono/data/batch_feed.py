"""What a loop or an evaluation of a stream of batches reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.data.batch_stream import BatchReaders, OpenPass, gives_batches
from unisono.data.content import Glance
from unisono.data.feed import Asked, refuse_beside
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

    @property
    def is_batched(self) -> bool:
        """The stream decides which samples a batch has."""
        return True

    @property
    def order(self) -> Order:
        """The order in which samples are counted."""
        batch = None if self.begun is None else self.begun.batch
        return StreamOrder(0, self.key.seed, first=0 if batch is None else batch.digest)

    @property
    def promised(self) -> int | None:
        """It says nothing of samples."""
        return None

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
