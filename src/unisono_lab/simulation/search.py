"""What simulated outcomes come to, and the way to run a job of which they are best: hosts, checkpoints and policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal

import numpy as np

from unisono.adapt.view import BatchShape
from unisono_lab.simulation.scenario import Scenario
from unisono_lab.simulation.simulated_run import SimulatedOutcome
from unisono_lab.simulation.training import Crew, StepClock

PAYS = 1.1
"""More workers are worth their price as long as they are faster by this factor."""

NORMAL_95 = 1.96

Aim = Literal["cost", "time"]

FEW_SEEDS = 6
"""Of candidates in the first rounds."""

KEPT = 3
"""Candidates that go on into the next round."""

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the hosts of a kind that are tried."""

MOST_MIXES = 60

INTERVALS_S = (60.0, 300.0, 1200.0)
"""Seconds between checkpoints that are tried."""


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


@dataclass(frozen=True, slots=True)
class Goal:
    """What a job should be like.

    Attributes:
        aim: what is as small as can be.
        deadline_s: the seconds that it may take; None for any.
        budget: what it may cost, in 95 % of the seeds; None for any.
        certainty: the share of the seeds that have to be in time.
    """

    aim: Aim = "cost"
    deadline_s: float | None = None
    budget: float | None = None
    certainty: float = 0.95

    def holds(self, answer: Expectation) -> bool:
        """Whether an answer is within the limits."""
        return answer.in_time.share >= self.certainty and answer.cost.p95 <= (
            math.inf if self.budget is None else self.budget
        )

    def key(self, answer: Expectation) -> tuple[bool, float, float]:
        """By which answers are ordered, the best first."""
        is_short = not self.holds(answer)
        return is_short, 1 - answer.in_time.share if is_short else 0.0, self.aimed_at(answer)

    def aimed_at(self, answer: Expectation) -> float:
        """What is to be small: the median cost, or the median seconds."""
        return answer.cost.p50 if self.aim == "cost" else answer.seconds.p50


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run the job, with what it comes to.

    Attributes:
        scenario: the scenario with it.
        answer: what it comes to.
    """

    scenario: Scenario
    answer: Expectation

    @property
    def hosts(self) -> str:
        """Its hosts, for people: ``2 on-demand, 14 spot``."""
        return ", ".join(f"{kind.count} {kind.name}" for kind in self.scenario.hosts if kind.count)

    @property
    def policies(self) -> str:
        """Its policies, for people."""
        return ", ".join(self.scenario.job.policies) or "none"

    @property
    def checkpoints(self) -> str:
        """How often it writes checkpoints, for people."""
        return f"every {every} steps" if (every := self.scenario.job.checkpoint_every) else "none"


@dataclass(frozen=True, slots=True)
class Margin:
    """What would be lost with the next best candidate in place of the best.

    Attributes:
        next: the next best candidate.
        share: the cost, or the time, that it takes more in the median, as a share of the best one's.
        has_other_hosts: whether it has another mix of hosts.
        holds: whether it is within deadline and budget.
    """

    next: Candidate
    share: float
    has_other_hosts: bool
    holds: bool


def margins(candidates: Sequence[Candidate], wish: Goal) -> list[Margin]:
    """Of the next best candidate, and of the next best with other hosts if that is another one.

    Args:
        candidates: the candidates, the best first, all with the same seeds.
        wish: what is wanted.
    """
    if len(candidates) < 2:
        return []
    best = candidates[0]
    other = next((one for one in candidates[1:] if one.hosts != best.hosts), candidates[1])
    found = [candidates[1]] if other is candidates[1] else [candidates[1], other]
    return [Margin(one, _more(best, one, wish), one.hosts != best.hosts, wish.holds(one.answer)) for one in found]


def _more(best: Candidate, other: Candidate, wish: Goal) -> float:
    mine, theirs = wish.aimed_at(best.answer), wish.aimed_at(other.answer)
    return theirs / mine - 1 if 0 < mine < math.inf else 0.0


Simulate = Callable[[Sequence[Scenario], int], list[Expectation]]
"""From scenarios and a number of seeds to the answer for each of them; seeds are the same for all."""


def search(
    scenario: Scenario,
    wish: Goal,
    simulate: Simulate,
    seeds: int,
    step_s: float,
    policies: Sequence[tuple[str, ...]] = (),
) -> tuple[list[Candidate], list[Candidate]]:
    """Look for the best way to run a job: first the mix of hosts, then checkpoints and policies.

    Args:
        scenario: the scenario with all hosts that can be had.
        wish: what is wanted.
        simulate: simulates.
        seeds: the number of seeds for the last candidates.
        step_s: seconds of a typical step.
        policies: the sets of policies to try; none for those of :func:`worth_trying`.

    Returns:
        the last candidates, the best first, two mixes of hosts among them if there are two; and all mixes of hosts,
        with few seeds.
    """
    few = min(FEW_SEEDS, seeds)
    tried = _ordered(mixes(scenario), wish, simulate, few)
    ways = [way for one in tried[:KEPT] for way in _ways(one.scenario, step_s, policies)]
    last = _finalists(_ordered(ways, wish, simulate, few))
    return _ordered([one.scenario for one in last], wish, simulate, seeds), tried


def _finalists(ordered: Sequence[Candidate]) -> Sequence[Candidate]:
    """The first ones; the last place is for the best with other hosts, so that it is known what these would cost."""
    kept = ordered[:KEPT]
    other = next((one for one in ordered if one.hosts != ordered[0].hosts), None)
    return kept if other is None or other in kept else [*kept[:-1], other]


def _ordered(scenarios: Sequence[Scenario], wish: Goal, simulate: Simulate, seeds: int) -> list[Candidate]:
    """Candidates, the best first. Of two that are as good, the one with fewer policies is the simpler one."""
    found = map(Candidate, scenarios, simulate(scenarios, seeds))
    return sorted(found, key=lambda one: (*wish.key(one.answer), len(one.scenario.job.policies)))


def frontier(tried: Sequence[Candidate]) -> list[Candidate]:
    """Those to which none of the others is better in time and in cost, the fastest first."""
    found: list[Candidate] = []
    for one in sorted(tried, key=lambda one: (one.answer.seconds.p50, one.answer.cost.p50)):
        if math.isfinite(one.answer.seconds.p50) and (not found or one.answer.cost.p50 < found[-1].answer.cost.p50):
            found.append(one)
    return found


def mixes(scenario: Scenario) -> list[Scenario]:
    """All mixes of hosts that are tried: of each kind none, a quarter, half, three quarters or all of them."""
    kinds = len(scenario.hosts)
    shares = next(
        each for each in (SHARES, SHARES[::2], SHARES[::4]) if len(each) ** kinds <= MOST_MIXES or len(each) == 2
    )
    counts = [sorted({round(share * kind.count) for share in shares}) for kind in scenario.hosts]
    found = []
    for chosen in product(*counts):
        counted = zip(scenario.hosts, chosen, strict=True)
        mix = replace(scenario, hosts=[kind.model_copy(update={"count": count}) for kind, count in counted])
        if mix.room >= scenario.job.fewest:
            found.append(mix)
    return found


def _ways(scenario: Scenario, step_s: float, policies: Sequence[tuple[str, ...]]) -> list[Scenario]:
    """The same hosts with other checkpoints and policies."""
    every = {scenario.job.checkpoint_every, *(max(1, round(seconds / step_s)) for seconds in INTERVALS_S)}
    return [
        scenario.run_with(checkpoint_every=steps, policies=names)
        for steps, names in product(sorted(every), policies or worth_trying(scenario))
    ]


def worth_trying(scenario: Scenario) -> list[tuple[str, ...]]:
    """Sets of policies that may change time or cost: none, the scenario's own, and one for each thing that it has.

    ``spot`` where hosts may be taken away, ``straggler`` where they differ in speed, and ``goodput`` where the gradient
    noise scale is given, since it changes the batch.
    """
    reasons = {
        "spot": any(kind.is_spot and kind.count for kind in scenario.hosts),
        "straggler": len({kind.speed for kind in scenario.hosts if kind.count}) > 1,
        "goodput": scenario.work.noise_scale is not None,
    }
    return [*dict.fromkeys([(), scenario.job.policies, *((name,) for name, holds in reasons.items() if holds)])]
