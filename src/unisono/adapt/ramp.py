"""A learning rate that changes smoothly."""

from __future__ import annotations

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

    def step(self) -> tuple[float, Ramp]:
        """The next step's factor, and what is left after it."""
        each: float = self.factor_left ** (1 / self.steps_left)
        return each, Ramp(self.steps_left - 1, self.factor_left / each)
