"""Who may go on without making somebody else's gradient too stale."""

from __future__ import annotations

from collections.abc import Iterable


class Reads:
    """Keeps the staleness of gradients within a bound.

    A worker reads the weights, computes, and asks to push; meanwhile others push. The staleness of its gradient is the
    number of pushes that were granted since the last one of those that had arrived when it read. A read or push is
    granted if all those that are under way can still push, in the order in which they read, each within the bound. So
    the one that read first may always push, and nobody waits for ever.

    Args:
        bound: the largest staleness; None for no limit.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._granted = self._arrived = 0
        self._reads: dict[int, int] = {}

    def read(self, worker: int) -> bool:
        """Ask to read; granted if true."""
        if not self._is_bearable(self._granted, [*self._reads.values(), self._arrived]):
            return False
        self._reads[worker] = self._arrived
        return True

    def push(self, worker: int) -> bool:
        """Ask to push what was computed since the read; granted if true."""
        others = [seen for other, seen in self._reads.items() if other != worker]
        if not self._is_bearable(self._granted + 1, others):
            return False
        del self._reads[worker]
        self._granted += 1
        return True

    def arrived(self) -> None:
        """A push that was granted is on all servers."""
        self._arrived += 1

    def give_up(self, worker: int) -> None:
        """What the worker has read is not going to be used."""
        self._reads.pop(worker, None)

    def _is_bearable(self, granted: int, reads: Iterable[int]) -> bool:
        if self._bound is None:
            return True
        return all(granted + turn - seen <= self._bound for turn, seen in enumerate(sorted(reads)))
