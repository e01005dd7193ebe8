"""A figure with its interval, and how intervals are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COVERED = 0.95

DRAWS = 5000

SEED = 0
"""The same figures have the same intervals."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and the interval in which it lies with 95 % confidence.

    Attributes:
        value: the figure.
        low: the interval's lower end; None if nothing is known of it, because it was measured once.
        high: the upper one.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __format__(self, digits: str) -> str:
        if self.low is None or self.high is None or self.low == self.high:
            return format(self.value, digits)
        return f"{self.value:{digits}} ({self.low:{digits}} … {self.high:{digits}})"

    @property
    def spread(self) -> float | None:
        """The interval's width as a share of the figure."""
        return None if self.low is None or self.high is None or not self.value else (self.high - self.low) / self.value

    def mapped(self, change: Callable[[float], float]) -> Estimate:
        """What a function makes of it that rises or falls throughout."""
        if self.low is None or self.high is None:
            return Estimate(change(self.value))
        low, high = sorted((change(self.low), change(self.high)))
        return Estimate(change(self.value), low, high)


def median(values: Sequence[float]) -> Estimate:
    """The median with its bootstrap interval (percentiles; Hoefler and Belli, SC 2015, section 3.1.3)."""
    return Estimate(float(np.median(values)), *_ends(_drawn_medians(values, _draws(len(values)))))


def ratio(values: Sequence[float], others: Sequence[float], *, paired: bool) -> Estimate:
    """The ratio of two medians with its bootstrap interval; without one if either was measured once.

    Args:
        values: measured figures.
        others: what they are divided by.
        paired: values of the same place were measured side by side, and are drawn together: what disturbed both then
            says nothing about their ratio.
    """
    ours = _draws(len(values))
    theirs = ours if paired else _draws(len(others), seed=SEED + 1)
    several = min(len(values), len(others)) > 1  # what was measured once may be as far off as anything
    drawn = _drawn_medians(values, ours) / _drawn_medians(others, theirs)
    return Estimate(float(np.median(values) / np.median(others)), *_ends(drawn if several else drawn[:0]))


def _draws(count: int, seed: int = SEED) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(count, size=(DRAWS, count))


def _drawn_medians(values: Sequence[float], draws: NDArray[np.int64]) -> Array:
    found: Array = np.median(np.asarray(values, dtype=float)[draws], axis=1)
    return found


def _ends(drawn: Array) -> tuple[float | None, float | None]:
    if not drawn.size or float(drawn.min()) == float(drawn.max()):
        return None, None
    low, high = np.quantile(drawn, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return float(low), float(high)
