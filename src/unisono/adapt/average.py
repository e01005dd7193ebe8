"""Moving averages that know how much they have seen."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Average:
    """An exponential moving average, corrected for its start at nothing.

    Attributes:
        decay: of the past, per value: 0 keeps the newest alone.
        total: of the values, each weighted with ``decay`` to the power of its age, times ``1 - decay``.
        weight: of all values together: 0 before the first, towards 1.
    """

    decay: float
    total: float = 0.0
    weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r}: needs to be at least 0 and below 1")

    def after(self, value: float) -> "Average":
        """The average with one more value."""
        share = 1 - self.decay
        return replace(self, total=self.decay * self.total + share * value, weight=self.decay * self.weight + share)

    @property
    def value(self) -> float | None:
        """The average; None before the first value."""
        return self.total / self.weight if self.weight else None
