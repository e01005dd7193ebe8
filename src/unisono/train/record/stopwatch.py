"""What this worker measures of its own steps, for all to see."""

from collections.abc import Mapping

from unisono.adapt.timings import Timings


class Stopwatch:
    """Keeps the times of the step before until the next control word takes them along.

    Attributes:
        shard_s: seconds that one shard of the step under way took.
        formed_s: seconds that forming the present generation took.
        checkpoint_s: seconds that the newest checkpoint took.
    """

    def __init__(self) -> None:
        self.shard_s = self.formed_s = self.checkpoint_s = 0.0
        self._seconds: Mapping[str, float] = {}
        self._sent = 0, 0

    def step_ends(self, seconds: Mapping[str, float], sent: tuple[int, int]) -> None:
        """A step is over.

        Args:
            seconds: that it took, by part, as in ``metrics.jsonl``.
            sent: bytes and messages that others got from this worker since the step before.
        """
        self._seconds, self._sent = dict(seconds), sent

    @property
    def timings(self) -> Timings:
        """All of it."""
        return Timings(
            shard_s=self.shard_s,
            step_s=self._seconds.get("total", 0.0),
            data_s=self._seconds.get("data", 0.0),
            exposed_s=self._seconds.get("exposed_communication", 0.0),
            update_s=self._seconds.get("update", 0.0),
            sent_bytes=float(self._sent[0]),
            formed_s=self.formed_s,
            checkpoint_s=self.checkpoint_s,
            sent_messages=float(self._sent[1]),
        )
