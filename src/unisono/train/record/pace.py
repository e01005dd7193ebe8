"""How fast this worker computes."""

from collections import deque
from statistics import median

RECENT = 9
FEWEST = 3


class Pace:
    """The seconds that one shard takes on this worker, over the last calls of ``step.run``."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)

    def note(self, seconds: float, shards: int) -> None:
        """So many shards were computed in so many seconds; without any there is nothing to know."""
        if shards:
            self._recent.append(seconds / shards)

    @property
    def shard_s(self) -> float:
        """The median; 0 as long as too little is known."""
        return median(self._recent) if len(self._recent) >= FEWEST else 0.0
