"""Who computes what next, where nobody waits for the slowest worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

from unisono.errors import WorkerLost
from unisono.sync.staleness import Reads


class Tickets:
    """Hands out the parts of one step after the other, each once. Many threads ask; some have to wait.

    Args:
        parts: of each step.
        reads: who may compute and who may push without making gradients too stale.
        first: the number of the first ticket, see :attr:`next`.

    Attributes:
        next: the number of the next ticket: steps times parts, and the part.
    """

    def __init__(self, parts: int, reads: Reads, first: int) -> None:
        self.next = first
        self._parts, self._reads = parts, reads
        self._changed = threading.Condition()
        self._is_over = False

    def claim(self, worker: int, step: int) -> int | None:
        """The next ticket of a step; None if it has none left. Whoever asks has used the one before.

        Raises:
            WorkerLost: the workers part.
        """
        with self._changed:
            self.next = max(self.next, step * self._parts)  # those of a step before that are left belong to the lost
            self._wait(lambda: self.next >= (step + 1) * self._parts or self._reads.read(worker))
            if self.next >= (step + 1) * self._parts:
                return None
            self.next += 1
            self._changed.notify_all()
            return self.next - 1

    def push(self, worker: int) -> None:
        """Wait until what was computed may be pushed.

        Raises:
            WorkerLost: the workers part.
        """
        with self._changed:
            self._wait(lambda: self._reads.push(worker))
            self._changed.notify_all()

    def arrived(self) -> None:
        """What was pushed has arrived."""
        with self._changed:
            self._reads.arrived()
            self._changed.notify_all()

    def end(self) -> None:
        """Whoever waits wakes."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _wait(self, holds: Callable[[], bool]) -> None:
        while not self._is_over:
            if holds():
                return
            self._changed.wait()
        raise WorkerLost("a worker was lost while others waited for their turn")
