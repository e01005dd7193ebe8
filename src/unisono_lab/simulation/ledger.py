"""Where the time and the money of a simulated job go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Part = Literal["training", "regroup", "waiting", "start"]
"""What a job does at a moment.

training  steps are computed
regroup   a generation ends, or forms: also until a loss is noticed
waiting   there are too few workers, or the job is not running
start     the first workers start
"""


@dataclass(frozen=True, slots=True)
class SizeChange:
    """A moment at which the number of workers, or the price of one, changed, for pictures."""

    seconds: float
    workers: int
    price: float
    samples: float


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """What became of one simulated job.

    Attributes:
        seed: the seed that it was drawn by.
        done: whether its work was done in the time that it was given.
        seconds: the seconds until then.
        cost: what all hosts cost.
        lost: seconds by what they were lost to: ``regroup``, ``waiting``, ``start``, ``repeated`` (steps computed
            again, and those that were broken off), ``checkpoints`` (what training stood still for them).
        steps: the number of steps.
        losses: the number of times that workers were lost or left on notice.
        generations: the number of generations.
        worker_seconds: seconds of training, times workers.
        marks: the changes of the number of workers, and of the price.
    """

    seed: int
    done: bool
    seconds: float
    cost: float
    lost: Mapping[str, float]
    steps: int
    losses: int
    generations: int
    worker_seconds: float
    marks: tuple[SizeChange, ...] = ()


@dataclass
class Ledger:
    """What has been spent so far.

    Attributes:
        part: what the job does now.
        repeated_s: seconds of training whose steps were lost.
        stall_s: seconds that training stood still for checkpoints.
        worker_seconds: seconds of training, times workers.
    """

    part: Part = "start"
    repeated_s: float = 0.0
    stall_s: float = 0.0
    worker_seconds: float = 0.0
    _since: float = 0.0
    _seconds: dict[Part, float] = field(default_factory=dict)

    def turn(self, part: Part, now: float) -> None:
        """From now on the job does something else."""
        self._seconds[self.part] = self._seconds.get(self.part, 0.0) + now - self._since
        self.part, self._since = part, now

    def lost(self) -> dict[str, float]:
        """Seconds, by what they were lost to."""
        found = {part: self._seconds.get(part, 0.0) for part in ("regroup", "waiting", "start")}
        return {**found, "repeated": self.repeated_s, "checkpoints": self.stall_s}
