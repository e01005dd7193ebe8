"""What happens in virtual time, in its order, and what a job spends that time on."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from typing import Literal

Part = Literal["training", "regroup", "waiting", "start"]
"""What a job does at a moment.

training  steps are computed
regroup   a generation ends, or forms: also until a loss is noticed
waiting   there are too few workers, or the job is not running
start     the first workers start
"""


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


class Course(Agenda):
    """The course of a job, and what it has lost so far.

    Attributes:
        part: what the job does now.
        repeated_s: seconds of training whose steps were lost.
        stall_s: seconds that training stood still for checkpoints.
        worker_seconds: seconds of training, times workers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part: Part = "waiting"
        self.repeated_s = self.stall_s = self.worker_seconds = 0.0
        self._turned_at = 0.0
        self._seconds: dict[Part, float] = defaultdict(float)

    def turn(self, part: Part) -> None:
        """From now on the job does something else."""
        self._seconds[self.part] = self._seconds[self.part] + self.now - self._turned_at
        self.part, self._turned_at = part, self.now

    def lost(self) -> dict[str, float]:
        """Seconds, by what they were lost to."""
        known = self._seconds
        spent = {"regroup": known["regroup"], "waiting": known["waiting"], "start": known["start"]}
        return {**spent, "repeated": self.repeated_s, "checkpoints": self.stall_s}
