"""What the loops of a script read, one after the other."""

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset

from unisono.data.batch_feed import BatchFeed
from unisono.data.batch_stream import gives_batches
from unisono.data.feed import Asked, Feed
from unisono.data.sampler_order import LoopKey
from unisono.data.stream_feed import StreamFeed


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
