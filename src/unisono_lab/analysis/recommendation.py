"""The recommended number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono_lab.analysis.summary import Row

HOUR_S = 3600.0

EFFICIENT = 0.8
"""The efficiency that is asked for unless somebody says otherwise."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of time, in any one currency.

    An hour of training on W workers costs ``waiting + worker · W``, as it does for
    :class:`~unisono.adapt.scaling_policy.ScalingPolicy`, whose ``waiting`` is 1.

    Attributes:
        worker: the price of an hour of one worker.
        waiting: the value of ending the training an hour earlier.
    """

    worker: float
    waiting: float = 0.0

    def costs(self, curve: Sequence[Row]) -> dict[int, float]:
        """Of an epoch, by workers; of a million samples where the epoch is not known of all."""
        seconds = [row.epoch_s.value for row in curve if row.epoch_s]
        if len(seconds) < len(curve):
            seconds = [1e6 / row.samples_per_s.value for row in curve]
        hours = {row.workers: each / HOUR_S for row, each in zip(curve, seconds, strict=True)}
        return {workers: (self.waiting + self.worker * workers) * each for workers, each in hours.items()}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Numbers of workers among those that were measured.

    Attributes:
        fastest: the smallest number of workers that is not slower than any other, beyond the noise.
        efficient: the largest number of workers with the efficiency that was asked for; None if none has it.
        cheapest: the number of workers with the lowest cost; None without prices.
        costs: the cost of an epoch or of a million samples, by number of workers; empty without prices.
        of_epochs: whether costs are those of an epoch.
    """

    fastest: Row
    efficient: Row | None
    cheapest: Row | None
    costs: Mapping[int, float]
    of_epochs: bool


def recommended(curve: Sequence[Row], threshold: float = EFFICIENT, prices: Prices | None = None) -> Recommendation:
    """The recommendation from the rows of one curve.

    Args:
        curve: the rows, at least one, none of which shared its cores.
        threshold: the efficiency asked for, 0 … 1.
        prices: the prices; None to leave costs out.
    """
    best = max(curve, key=lambda row: row.samples_per_s.value)
    fastest = min((row for row in curve if not _slower(row, best)), key=lambda row: row.workers)
    good = [row for row in curve if row.efficiency is not None and row.efficiency.value >= threshold]
    costs = {} if prices is None else prices.costs(curve)
    return Recommendation(
        fastest=fastest,
        efficient=max(good, key=lambda row: row.workers, default=None),
        cheapest=min(curve, key=lambda row: (costs[row.workers], row.workers)) if costs else None,
        costs=costs,
        of_epochs=all(row.epoch_s for row in curve),
    )


def _slower(row: Row, best: Row) -> bool:
    """Whether the two intervals do not meet; figures without intervals count as they are."""
    one, other = row.samples_per_s, best.samples_per_s
    return (one.value if one.high is None else one.high) < (other.value if other.low is None else other.low)
