"""What many simulated outcomes say together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from unisono.adapt.view import BatchShape
from unisono_lab.simulation.scenario import Scenario
from unisono_lab.simulation.simulated_run import SimulatedOutcome
from unisono_lab.simulation.step_clock import Crew, StepClock

PAYS = 1.1
"""More workers are worth their price as long as they are faster by this factor."""

NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds: its median, and what 95 % of the seeds do not exceed."""

    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Over at least one value; infinite ones are of jobs that were not done."""
        return cls(*(float(np.quantile(values, share, method="inverted_cdf")) for share in (0.5, 0.95)))


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The share of seeds of which something holds, and its 95 % interval (Wilson, JASA 1927)."""

    share: float
    low: float
    high: float

    @classmethod
    def of(cls, good: int, tried: int) -> Likelihood:
        """Of so many seeds, of which it holds for some."""
        return cls(good / tried, *wilson(good, tried))


@dataclass(frozen=True, slots=True)
class Expectation:
    """What outcomes of one scenario say.

    Attributes:
        seconds: the seconds of the whole job; infinite for one that was not done.
        cost: the cost of all hosts, until the job was done or given up.
        in_time: the seeds that were done by the deadline, or at all if there is none.
        in_budget: the seeds that were done, and cost no more than the budget; None without a budget.
        lost: mean seconds, by what they were lost to.
        losses: the mean number of workers that were lost, or left on notice.
        seeds: the number of seeds.
    """

    seconds: Spread
    cost: Spread
    in_time: Likelihood
    in_budget: Likelihood | None
    lost: Mapping[str, float]
    losses: float
    seeds: int


def answer(
    outcomes: Sequence[SimulatedOutcome], deadline_s: float | None = None, budget: float | None = None
) -> Expectation:
    """Put outcomes of one scenario together.

    Args:
        outcomes: at least one.
        deadline_s: the seconds that the job may take; None for any.
        budget: what it may cost; None for any.
    """
    seconds = [each.seconds if each.done else math.inf for each in outcomes]
    good = sum(each <= (math.inf if deadline_s is None else deadline_s) and each < math.inf for each in seconds)
    cheap = None if budget is None else sum(each.done and each.cost <= budget for each in outcomes)
    lost = {part: float(np.mean([each.lost[part] for each in outcomes])) for part in outcomes[0].lost}
    return Expectation(
        seconds=Spread.of(seconds),
        cost=Spread.of([each.cost for each in outcomes]),
        in_time=Likelihood.of(good, len(outcomes)),
        in_budget=None if cheap is None else Likelihood.of(cheap, len(outcomes)),
        lost=lost,
        losses=float(np.mean([each.losses for each in outcomes])),
        seeds=len(outcomes),
    )


def wilson(good: int, tried: int) -> tuple[float, float]:
    """The 95 % interval of a probability: Wilson, "Probable inference", JASA 22(158), 1927."""
    share, square = good / tried, NORMAL_95**2
    middle = (share + square / (2 * tried)) / (1 + square / tried)
    half = NORMAL_95 / (1 + square / tried) * math.sqrt(share * (1 - share) / tried + square / (4 * tried**2))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class WorkerRate:
    """What so many workers of speed 1 train on in a second, when nothing goes wrong; and what one more brings."""

    workers: int
    samples_per_s: float
    extrapolated: bool


def rates(scenario: Scenario, most: int) -> list[WorkerRate]:
    """Throughputs of 1, 2, 4 … workers, by the fitted step time with its jitter.

    Args:
        scenario: the scenario.
        most: the largest number of workers.
    """
    work = scenario.work
    sizes = [size for size in (2**power for power in range(most.bit_length())) if size <= most]
    clock, shape = StepClock(scenario, np.random.default_rng(0)), BatchShape(work.batch_size, work.shards)
    found = []
    for workers in sorted({*sizes, most}):
        crew = Crew.of([(1.0, -(-work.shards // workers))] * workers)
        step_s = float(np.mean(clock.draw(crew, shape, 256)))
        found.append(WorkerRate(workers, work.batch_size / step_s, workers > scenario.measured_to))
    return found


def enough(found: Sequence[WorkerRate]) -> int:
    """The number of workers from which more no longer pays: the next larger one is hardly faster, or is not tried."""
    for rate, more in pairwise(found):
        if more.samples_per_s < PAYS * rate.samples_per_s:
            return rate.workers
    return found[-1].workers
