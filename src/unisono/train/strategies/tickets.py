"""Who computes what next, where nobody waits for the slowest worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

from unisono.errors import NoProgress, WorkerLost
from unisono.sync.staleness import Reads


class Tickets:
    """Hands out the parts of one step after the other, each once. Many threads ask; some have to wait.

    Args:
        parts: of each step.
        reads: who may compute and who may push without making gradients too stale.
        timeout_s: how long to wait while nobody else gets on.
        called: how to speak of the worker of a rank.

    Attributes:
        next: the number of the next ticket: steps times parts, and the part.
    """

    def __init__(
        self, parts: int, reads: Reads, timeout_s: float, called: Callable[[int], str] = "rank {}".format
    ) -> None:
        self.next, self._timeout_s = 0, timeout_s
        self._parts, self._reads, self._called = parts, reads, called
        self._changed = threading.Condition()
        self._is_over = False

    def claim(self, worker: int, step: int) -> int | None:
        """The next ticket of a step; None if it has none left. Whoever asks is done with the one before.

        Raises:
            WorkerLost: the workers part.
            NoProgress: those who go first do not get on.
        """
        with self._changed:
            self._reads.give_up(worker)  # a step that is skipped is not pushed
            self._changed.notify_all()
            self.next = max(self.next, step * self._parts)  # those of a step before that are left belong to the lost
            self._wait(worker, lambda: self.next >= (step + 1) * self._parts or self._reads.read(worker))
            if self.next >= (step + 1) * self._parts:
                return None
            self.next += 1
            self._changed.notify_all()
            return self.next - 1

    def taken(self, worker: int, step: int) -> None:
        """Wait until there are no tickets of a step any more.

        Raises:
            WorkerLost: the workers part.
            NoProgress: nobody takes them.
        """
        with self._changed:
            self._wait(worker, lambda: self.next >= (step + 1) * self._parts)

    def push(self, worker: int) -> None:
        """Wait until what was computed may be pushed.

        Raises:
            WorkerLost: the workers part.
            NoProgress: those who go first do not get on.
        """
        with self._changed:
            self._wait(worker, lambda: self._reads.push(worker))
            self._changed.notify_all()

    def arrived(self, worker: int) -> None:
        """What the worker pushed has arrived."""
        with self._changed:
            self._reads.arrived(worker)
            self._changed.notify_all()

    def end(self) -> None:
        """Whoever waits wakes."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _wait(self, worker: int, holds: Callable[[], bool]) -> None:
        while not self._is_over:
            if holds():
                return
            if not self._changed.wait(self._timeout_s):
                out = ", ".join(self._called(other) for other in self._reads.out if other != worker) or "the others"
                raise NoProgress(
                    f"{self._called(worker)} waited for its turn in vain, which comes after {out}. It hangs, or takes "
                    f"longer for something than the others: see its log, or allow more with "
                    f"unisono.init(failure_timeout_s=…)"
                )
        raise WorkerLost("a worker was lost while others waited for their turn")
