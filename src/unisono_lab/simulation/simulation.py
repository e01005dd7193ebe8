"""A simulation as a value: what was asked, all that is answered, and the commands that start the job."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from typing import Literal

import numpy as np

from unisono.adapt.named import NAMED
from unisono.adapt.view import BatchShape
from unisono.errors import JobError
from unisono.named import require_named
from unisono_lab.simulation.coordination import MOST_RESTARTS
from unisono_lab.simulation.scenario import HostKind, Scenario
from unisono_lab.simulation.seeds import KnownOutcomes
from unisono_lab.simulation.simulated_run import SimulatedOutcome
from unisono_lab.simulation.training import SPOT, Crew, StepClock

# What simulated outcomes come to, and the way to run a job of which they are best: hosts, checkpoints and policies.


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


# A simulation as a value: what was asked, all that is answered, and the commands that start the job.


GUESS = 2.0
"""By which figures that nobody measured are multiplied and divided, to see what they matter."""

GUESS_SEEDS = 4
"""So many are simulated with each of these."""

LONGEST, LONGEST_ALONE = 20.0, 2.0
"""Times the deadline, and times what the slowest number of workers takes without trouble: then a job is given up."""

MATTERS = 0.005
"""A change of the median that is told."""


PORT = 7777
"""Of the coordinator, as the commands have it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The same job with other policies.

    Attributes:
        name: the policies, for people.
        answer: what it comes to.
        outcomes: the outcome of each seed.
    """

    name: str
    answer: Expectation
    outcomes: Sequence[SimulatedOutcome]


@dataclass(frozen=True, slots=True)
class Guess:
    """What the job would come to if a figure that nobody measured were another one.

    Attributes:
        name: the figure.
        value: its value.
        factor: the factor by which it was multiplied.
        seconds: the median time, as a multiple.
        cost: the median cost, as a multiple.
    """

    name: str
    value: float
    factor: float
    seconds: float
    cost: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """All that is answered.

    Attributes:
        scenario: the scenario.
        wish: the limits, and what is searched for.
        variants: the answers, one for each set of policies.
        rates: throughputs by the number of workers.
        guesses: what figures that nobody measured matter.
        candidates: the best ways to run the job; none if they were not searched for.
        tried: all mixes of hosts that the search has tried, with few seeds.
    """

    scenario: Scenario
    wish: Goal
    variants: Sequence[Variant]
    rates: Sequence[WorkerRate]
    guesses: Sequence[Guess] = ()
    candidates: Sequence[Candidate] = ()
    tried: Sequence[Candidate] = ()

    @property
    def is_extrapolation(self) -> bool:
        """Whether more workers are simulated than were measured."""
        return self.scenario.room > self.scenario.measured_to


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What is asked of a simulation.

    Attributes:
        wish: the limits, and what is searched for.
        policies: sets of policies to put side by side, and to search among; none for the scenario's own, and for all
            that may matter.
        seeds: the number of seeds.
        first_seed: the first of them.
        processes: the number of processes that simulate.
        searches: whether the best way to run the job is searched for.
    """

    wish: Goal = field(default_factory=Goal)
    policies: Sequence[tuple[str, ...]] = ()
    seeds: int = 40
    first_seed: int = 0
    processes: int = 1
    searches: bool = False

    def answer(self, outcomes: Sequence[SimulatedOutcome]) -> Expectation:
        """What outcomes of one scenario come to, within the limits."""
        return answer(outcomes, self.wish.deadline_s, self.wish.budget)


def until_s(scenario: Scenario, deadline_s: float | None) -> float:
    """The virtual seconds after which a job is given up."""
    speed = min(1.0, *(kind.speed for kind in scenario.hosts if kind.count))
    slowest = speed * min(rate.samples_per_s for rate in rates(scenario, scenario.room))
    return max(LONGEST * (deadline_s or 0.0), LONGEST_ALONE * scenario.work.samples / slowest, 86_400.0)


def simulation(scenario: Scenario, asked: SimulationSettings) -> Simulation:
    """Simulate what is asked.

    Raises:
        JobError: a policy is unknown, a trace cannot be read, or the simulated job fails.
    """
    chosen = asked.policies or [scenario.job.policies]
    for names in chosen:
        require_named(names, [*NAMED, SPOT], "policy", "--policies" if asked.policies else "job.policies")
    scenarios = [scenario.run_with(policies=names) for names in chosen]
    known = KnownOutcomes(asked.first_seed, until_s(scenario, asked.wish.deadline_s), asked.processes)
    found = known.of(scenarios, asked.seeds)
    variants = [
        Variant(", ".join(names) or "no policies", asked.answer(each), each)
        for names, each in zip(chosen, found, strict=True)
    ]
    if not any(each.done for one in variants for each in one.outcomes):
        raise JobError(
            "the job is not done in any of the seeds: its hosts are there too seldom, or checkpoints too far apart "
            "(job.checkpoint_every); what has been trained is lost again and again"
        )

    def simulate(scenarios: Sequence[Scenario], seeds: int) -> list[Expectation]:
        return [asked.answer(each) for each in known.of(scenarios, seeds)]

    speeds = rates(scenario, scenario.room)
    step_s = scenario.work.batch_size / speeds[-1].samples_per_s
    guesses = _guesses(scenario, simulate, min(GUESS_SEEDS, asked.seeds))
    if not asked.searches:
        return Simulation(scenario, asked.wish, variants, speeds, guesses)
    best, tried = search(scenario, asked.wish, simulate, asked.seeds, step_s, asked.policies)
    return Simulation(scenario, asked.wish, variants, speeds, guesses, best, tried)


def _guesses(scenario: Scenario, simulate: Simulate, seeds: int) -> list[Guess]:
    """Figures by default, at half and at double their values, with the same few seeds."""
    figures = scenario.figures()
    names = [name for name, source in scenario.sources.items() if source == "default" and figures[name]]
    tried = [(name, factor) for name in names if name != "gamma" for factor in (1 / GUESS, GUESS)]
    if not tried:
        return []
    scenarios = [scenario, *(scenario.scaled(name, factor) for name, factor in tried)]
    base, *others = simulate(scenarios, seeds)
    found = []
    for (name, factor), other in zip(tried, others, strict=True):
        seconds, cost = _times(other.seconds.p50, base.seconds.p50), _times(other.cost.p50, base.cost.p50)
        if abs(seconds - 1) > MATTERS or abs(cost - 1) > MATTERS:
            found.append(Guess(name, figures[name], factor, seconds, cost))
    return found


def _times(one: float, other: float) -> float:
    return 1.0 if not other or not math.isfinite(one) or not math.isfinite(other) else one / other


@dataclass(frozen=True, slots=True)
class HostCommand:
    """What is run on some hosts.

    Attributes:
        hosts: the hosts, for people: ``each of 3 spot hosts``.
        words: the command.
    """

    hosts: str
    words: str


def commands(scenario: Scenario) -> list[HostCommand]:
    """Of the first host, on which the coordinator is, and of all others, by kind. A host that stays comes first."""
    kinds = sorted((kind for kind in scenario.hosts if kind.count), key=lambda kind: kind.is_spot)
    if not kinds:
        return []
    first, *others = kinds
    more = [(first, first.count - 1, "other "), *((kind, kind.count, "") for kind in others)]
    joins = [HostCommand(_hosts(kind, count, word), _join(scenario, kind)) for kind, count, word in more if count]
    return [HostCommand(f"one {first.name} host", _run(scenario, first, alone=not joins)), *joins]


def left_out(scenario: Scenario) -> list[str]:
    """What was simulated, and is not in the commands."""
    spot = [kind for kind in scenario.hosts if kind.count and kind.is_spot]
    found = []
    if spot:
        names = " or ".join(kind.name for kind in spot)
        found.append(f"A {names} host that comes back runs its command again as it starts: what rents it sees to that.")
    if spot and len(spot) == sum(kind.count > 0 for kind in scenario.hosts):
        found.append(
            "All hosts may be taken away. The simulation loses no coordinator, and starts a job that all have left "
            "again: run the coordinator with --here 0 on a host that stays, and unisono run again when it has ended."
        )
    if (begin := scenario.job.begin_with) is not None and begin < scenario.room:
        found.append(f"The simulated job begins with {begin} workers: ask for them with unisono resize {begin}.")
    if "spot" in scenario.job.policies:
        found.append("The commands have no policy spot: unisono.SpotPolicy needs a market, which the script gives it.")
    return found


def _hosts(kind: HostKind, count: int, word: str) -> str:
    return f"the {word}{kind.name} host" if count == 1 else f"each of {count} {word}{kind.name} hosts"


def _run(scenario: Scenario, kind: HostKind, *, alone: bool) -> str:
    words = ["unisono", "run", "-n", f"{scenario.job.fewest}:{scenario.room}"]
    if not alone:
        words += ["--here", str(kind.workers), "--coordinator", f":{PORT}"]
    return shlex.join([*words, "--max-restarts", str(MOST_RESTARTS), *_alike(scenario, kind), "train.py"])


def _join(scenario: Scenario, kind: HostKind) -> str:
    words = ["unisono", "join", f"https://HOST:{PORT}", "-n", str(kind.workers)]
    words += ["--token-file", "token", "--certificate", "certificate.pem"]
    return shlex.join([*words, *_alike(scenario, kind), "train.py"])


def _alike(scenario: Scenario, kind: HostKind) -> Sequence[str]:
    """Options of both: what all workers have in common, and the notices of these hosts."""
    job = scenario.job
    words = ["--failure-timeout-s", f"{job.failure_timeout_s:g}", "--shards", str(scenario.work.shards)]
    words += ["--checkpoint-every", str(job.checkpoint_every)] if job.checkpoint_every else []
    words += [word for name in job.policies if name != "spot" for word in ("--policy", name)]
    return [*words, *(["--notices", "auto"] if kind.is_spot and kind.notice_s else [])]


def as_json(found: Simulation) -> Mapping[str, object]:
    """All of it but the pictures, for programs; what is infinite is null."""
    return {
        "extrapolation": found.is_extrapolation,
        "measured_to": found.scenario.measured_to,
        "variants": [{"policies": one.name, **_written(one.answer)} for one in found.variants],
        "rates": [asdict(rate) for rate in found.rates],
        "figures": {
            name: {"value": value, "source": found.scenario.sources.get(name, "default")}
            for name, value in found.scenario.figures().items()
        },
        "guesses": [
            {"figure": one.name, "value": one.value, "factor": one.factor, "time": one.seconds, "cost": one.cost}
            for one in found.guesses
        ],
        "candidates": [
            {
                **_way(one),
                "commands": [{"hosts": each.hosts, "command": each.words} for each in commands(one.scenario)],
                "left_out": left_out(one.scenario),
                "holds": found.wish.holds(one.answer),
                **_written(one.answer),
            }
            for one in found.candidates
        ],
        "margins": [
            {**_way(one.next), "more": _finite(one.share), "holds": one.holds}
            for one in margins(found.candidates, found.wish)
        ],
    }


def _way(one: Candidate) -> dict[str, object]:
    job = one.scenario.job
    return {"hosts": one.hosts, "checkpoint_every": job.checkpoint_every, "policies": list(job.policies)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _written(found: Expectation) -> dict[str, object]:
    budget = found.in_budget
    return {
        "seeds": found.seeds,
        "seconds_p50": _finite(found.seconds.p50),
        "seconds_p95": _finite(found.seconds.p95),
        "cost_p50": found.cost.p50,
        "cost_p95": found.cost.p95,
        "in_time": found.in_time.share,
        "in_time_95": [found.in_time.low, found.in_time.high],
        "in_budget": budget and budget.share,
        "in_budget_95": budget and [budget.low, budget.high],
        "lost_s": dict(found.lost),
        "losses": found.losses,
    }
