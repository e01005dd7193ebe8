"""How many workers to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.study.summary import Row

HOUR_S = 3600.0

EFFICIENT = 0.8
"""The efficiency that is asked for unless somebody says otherwise."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What time costs, in any one currency.

    An hour of training on W workers costs ``waiting + worker · W``, as it does for
    :class:`~unisono.adapt.scaling_policy.ScalingPolicy`, whose ``waiting`` is 1.

    Attributes:
        worker: of an hour of one worker.
        waiting: what it is worth that the training ends an hour earlier.
    """

    worker: float
    waiting: float = 0.0

    def cost(self, row: Row) -> float:
        """Of an epoch; of a million samples where the epoch is not known."""
        seconds = row.epoch_s.value if row.epoch_s else 1e6 / row.samples_per_s.value
        return (self.waiting + self.worker * row.workers) * seconds / HOUR_S


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Numbers of workers among those that were measured.

    Attributes:
        fastest: the fewest workers that are not slower than any other number, beyond the noise.
        efficient: the most workers with the efficiency that was asked for.
        cheapest: with the lowest cost; None without prices.
    """

    fastest: Row
    efficient: Row | None
    cheapest: Row | None


def recommended(curve: Sequence[Row], threshold: float = EFFICIENT, prices: Prices | None = None) -> Recommendation:
    """From the rows of one curve.

    Args:
        curve: at least one, none of which shared its cores.
        threshold: the efficiency asked for, 0 … 1.
        prices: None to leave costs out.
    """
    best = max(curve, key=lambda row: row.samples_per_s.value)
    fastest = min((row for row in curve if not _slower(row, best)), key=lambda row: row.workers)
    good = [row for row in curve if row.efficiency is not None and row.efficiency.value >= threshold]
    return Recommendation(
        fastest=fastest,
        efficient=max(good, key=lambda row: row.workers, default=None),
        cheapest=None if prices is None else min(curve, key=lambda row: (prices.cost(row), row.workers)),
    )


def _slower(row: Row, best: Row) -> bool:
    """Whether the two intervals do not meet; figures without intervals count as they are."""
    one, other = row.samples_per_s, best.samples_per_s
    return (one.value if one.high is None else one.high) < (other.value if other.low is None else other.low)
