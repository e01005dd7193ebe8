"""Who may go on without making somebody else's gradient too stale."""

from __future__ import annotations

from collections.abc import Iterable


class Reads:
    """Keeps the staleness of gradients within a bound.

    A worker reads the weights, computes, and asks to push; meanwhile others push. Pushes overtake each other on their
    way, so a gradient may become as stale as the number of other pushes that were granted before it arrived, without
    those that had arrived when it read. A read or push is granted if none that is on its way can become too stale by
    it, and if all who have read can still push, in the order in which they read, each within the bound. So the one that
    read first may push as soon as nothing is on its way, and nobody waits for ever.

    Args:
        bound: the largest staleness; None for no limit.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._granted = self._arrived = 0
        self._reads: dict[int, int] = {}  # by worker, how many pushes had arrived when it read
        self._pushes: dict[int, int] = {}  # the same of those whose push is on its way

    @property
    def out(self) -> list[int]:
        """The workers that have read, and whose push has yet to arrive."""
        return sorted({*self._reads, *self._pushes})

    def read(self, worker: int) -> bool:
        """Ask to read; granted if true."""
        if not self._is_bearable(self._granted, [*self._reads.values(), self._arrived]):
            return False
        self._reads[worker] = self._arrived
        return True

    def push(self, worker: int) -> bool:
        """Ask to push what was computed since the read; granted if true."""
        others = [seen for other, seen in self._reads.items() if other != worker]
        on_their_way = [*self._pushes.values(), self._reads[worker]]
        if not self._is_bearable(self._granted + 1, others, on_their_way):
            return False
        self._pushes[worker] = self._reads.pop(worker)
        self._granted += 1
        return True

    def arrived(self, worker: int) -> None:
        """What the worker was granted to push is on all servers."""
        del self._pushes[worker]
        self._arrived += 1

    def give_up(self, worker: int) -> None:
        """What the worker has read is not going to be used."""
        self._reads.pop(worker, None)

    def _is_bearable(self, granted: int, reads: Iterable[int], on_their_way: Iterable[int] = ()) -> bool:
        if self._bound is None:
            return True
        stalest = [granted - 1 - seen for seen in on_their_way]
        stalest += [granted + turn - seen for turn, seen in enumerate(sorted(reads))]
        return all(staleness <= self._bound for staleness in stalest)
