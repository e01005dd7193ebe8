"""How this worker's main thread does, as another thread sees it."""

from collections.abc import Hashable
from time import perf_counter

from unisono.membership.messages import Pulse
from unisono.train.group.workers import Workers


class Heartbeat:
    """Looks at the main thread now and then, and notices when it comes no further.

    It is called by one thread. The main thread only sets plain attributes, here and on its workers.

    Attributes:
        forms: whether the main thread meets the workers of a new generation.
        shard_s: the seconds that computing one shard takes lately; 0 as long as nobody wants to know.
    """

    def __init__(self) -> None:
        self.forms = False
        self.shard_s = 0.0
        self._seen: Hashable = None
        self._was_called = False
        self._since = perf_counter()
        self._longest_s = 0.0

    def look(self, workers: Workers) -> Pulse:
        """How it does now, at work with these workers."""
        now = perf_counter()
        waits = self.forms or workers.waits
        seen = (workers.generation.number, workers.ticks, workers.is_called)
        if seen != self._seen and self._was_called:
            self._longest_s = max(self._longest_s, now - self._since)
        if waits or seen != self._seen:
            self._seen, self._since = seen, now
        self._was_called = workers.is_called and not waits
        return Pulse(
            doing="wait" if waits else "call" if workers.is_called else "script",
            still_s=now - self._since,
            longest_s=self._longest_s,
            shard_s=self.shard_s,
        )
