"""What happens in virtual time, in its order."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """Everything that is to happen, by its time; at one moment in the order in which it was planned.

    Attributes:
        now: the virtual time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, moment: float, what: Callable[[], None]) -> None:
        """Plan something for a moment, in seconds."""
        self._count += 1
        heapq.heappush(self._heap, (moment, self._count, what))

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Plan something for so many seconds from now."""
        self.at(self.now + seconds, what)

    def go_on(self) -> bool:
        """Let the next thing happen, at its time; False if there is none."""
        if not self._heap:
            return False
        self.now, _, what = heapq.heappop(self._heap)
        what()
        return True
