"""The cheapest, or the fastest, way to run a job, among those that are simulated: hosts, checkpoints and policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from unisono_lab.simulation.answers import Expectation
from unisono_lab.simulation.scenario import Scenario

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
        replace(scenario, job=scenario.job.model_copy(update={"checkpoint_every": steps, "policies": names}))
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
