"""A learning rate that changes smoothly."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ramp:
    """A factor, spread evenly over steps: an immediate jump hurts (Lin et al., arXiv 1904.12043).

    Attributes:
        steps_left: over which.
        factor_left: by which the rate is still to be multiplied.
    """

    steps_left: int = 0
    factor_left: float = 1.0

    def __post_init__(self) -> None:
        if self.steps_left < 0 or not 0 < self.factor_left < math.inf:
            raise ValueError(f"{self.factor_left!r} over {self.steps_left!r} steps: a factor above 0 over 0 or more")

    def step(self) -> tuple[float, Ramp]:
        """The next step's factor, and what is left after it."""
        each: float = self.factor_left ** (1 / self.steps_left)
        return each, Ramp(self.steps_left - 1, self.factor_left / each)
