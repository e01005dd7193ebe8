"""A simulation as a value: its settings, its answers, and the commands that start the job."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from typing import Literal

import numpy as np

from unisono.adapt.policy_names import NAMED
from unisono.adapt.view import BatchShape
from unisono.errors import JobError
from unisono.named import require_named
from unisono_lab.simulation.coordination import MOST_RESTARTS
from unisono_lab.simulation.scenario import HostKind, Scenario
from unisono_lab.simulation.simulated_run import OutcomeCache, SimulatedOutcome
from unisono_lab.simulation.simulated_training import SPOT, Crew, StepClock

# Statistics of simulated outcomes, and the search for the best hosts, checkpoints and policies.


PAYS = 1.1
"""More workers pay as long as they are faster by this factor."""

NORMAL_95 = 1.96

Aim = Literal["cost", "time"]

FEW_SEEDS = 6
"""The number of seeds for candidates in the first rounds."""

MOST_FINALISTS = 3
"""The number of candidates that go on into the next round."""

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The shares of the hosts of a kind that are tried."""

MOST_MIXES = 60

INTERVALS_S = (60.0, 300.0, 1200.0)
"""The times between checkpoints that are tried."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds: its median and its 95th percentile."""

    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value; those of jobs that were not done are infinite."""
        return cls(*(float(np.quantile(values, share, method="inverted_cdf")) for share in (0.5, 0.95)))


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The share of seeds for which a condition holds, and its 95 % interval (Wilson, JASA 1927)."""

    share: float
    low: float
    high: float

    @classmethod
    def of(cls, good: int, tried: int) -> Likelihood:
        """The likelihood from the number of seeds for which the condition holds, and of all."""
        return cls(good / tried, *wilson(good, tried))


@dataclass(frozen=True, slots=True)
class Expectation:
    """The statistics of one scenario's outcomes.

    Attributes:
        seconds: the seconds of the whole job; infinite if it was not done.
        cost: the cost of all hosts, until the job was done or given up.
        in_time: the likelihood that the job is done by the deadline, or at all if there is none.
        in_budget: the likelihood that the job is done within the budget; None without a budget.
        lost: the mean lost seconds, by cause.
        losses: the mean number of workers that were lost, or left on notice.
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
    """The statistics of one scenario's outcomes, at least one."""
    seconds = [outcome.seconds if outcome.done else math.inf for outcome in outcomes]
    good = sum(time_s <= (math.inf if deadline_s is None else deadline_s) and time_s < math.inf for time_s in seconds)
    cheap = None if budget is None else sum(outcome.done and outcome.cost <= budget for outcome in outcomes)
    lost = {part: float(np.mean([outcome.lost[part] for outcome in outcomes])) for part in outcomes[0].lost}
    return Expectation(
        seconds=Spread.of(seconds),
        cost=Spread.of([outcome.cost for outcome in outcomes]),
        in_time=Likelihood.of(good, len(outcomes)),
        in_budget=None if cheap is None else Likelihood.of(cheap, len(outcomes)),
        lost=lost,
        losses=float(np.mean([outcome.losses for outcome in outcomes])),
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
    """The throughput of a number of workers of speed 1 without losses, and whether it is extrapolated."""

    workers: int
    samples_per_s: float
    extrapolated: bool


def rates(scenario: Scenario, most: int) -> list[WorkerRate]:
    """Throughputs of 1, 2, 4 … workers, by the fitted step time with its jitter."""
    work = scenario.work
    sizes = [size for size in (2**power for power in range(most.bit_length())) if size <= most]
    clock, shape = StepClock(scenario, np.random.default_rng(0)), BatchShape(work.batch_size, work.shards)
    throughputs = []
    for workers in sorted({*sizes, most}):
        crew = Crew.of([(1.0, -(-work.shards // workers))] * workers)
        step_s = float(np.mean(clock.draw(crew, shape, 256)))
        throughputs.append(WorkerRate(workers, work.batch_size / step_s, workers > scenario.measured_to))
    return throughputs


def enough(rates: Sequence[WorkerRate]) -> int:
    """The number of workers beyond which more do not pay: the next larger number is hardly faster, or not tried."""
    for rate, more in pairwise(rates):
        if more.samples_per_s < PAYS * rate.samples_per_s:
            return rate.workers
    return rates[-1].workers


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a search.

    Attributes:
        budget: the cost that the job may have in 95 % of the seeds; None for no limit.
        certainty: the share of the seeds that must be in time.
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
        """The key by which answers are sorted, the best first."""
        is_short = not self.holds(answer)
        return is_short, 1 - answer.in_time.share if is_short else 0.0, self.aimed_at(answer)

    def aimed_at(self, answer: Expectation) -> float:
        """The figure to minimise: the median cost, or the median seconds."""
        return answer.cost.p50 if self.aim == "cost" else answer.seconds.p50


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run the job, with its simulated time and cost."""

    scenario: Scenario
    answer: Expectation

    @property
    def hosts(self) -> str:
        """The hosts as text: ``2 on-demand, 14 spot``."""
        return ", ".join(f"{kind.count} {kind.name}" for kind in self.scenario.hosts if kind.count)

    @property
    def policies(self) -> str:
        """The policies as text."""
        return ", ".join(self.scenario.job.policies) or "none"

    @property
    def checkpoints(self) -> str:
        """The interval of checkpoints as text."""
        return f"every {every} steps" if (every := self.scenario.job.checkpoint_every) else "none"


@dataclass(frozen=True, slots=True)
class Margin:
    """The difference between the best candidate and a next best one.

    Attributes:
        share: the additional median cost or time, as a share of the best one's.
        has_other_hosts: whether the next best one has another mix of hosts.
        holds: whether the next best one is within deadline and budget.
    """

    next: Candidate
    share: float
    has_other_hosts: bool
    holds: bool


def margins(candidates: Sequence[Candidate], goal: Goal) -> list[Margin]:
    """The margins of the next best candidate, and of the next best one with other hosts if that is another one.

    Candidates come the best first, all with the same seeds.
    """
    if len(candidates) < 2:
        return []
    best = candidates[0]
    other = next((candidate for candidate in candidates[1:] if candidate.hosts != best.hosts), candidates[1])
    next_best = [candidates[1]] if other is candidates[1] else [candidates[1], other]
    return [
        Margin(candidate, _more(best, candidate, goal), candidate.hosts != best.hosts, goal.holds(candidate.answer))
        for candidate in next_best
    ]


def _more(best: Candidate, other: Candidate, goal: Goal) -> float:
    best_value, other_value = goal.aimed_at(best.answer), goal.aimed_at(other.answer)
    return other_value / best_value - 1 if 0 < best_value < math.inf else 0.0


Simulate = Callable[[Sequence[Scenario], int], list[Expectation]]
"""Simulates scenarios with a number of seeds, the same for all; returns the statistics of each."""


def search(
    scenario: Scenario,
    goal: Goal,
    simulate: Simulate,
    seeds: int,
    step_s: float,
    policies: Sequence[tuple[str, ...]] = (),
) -> tuple[list[Candidate], list[Candidate]]:
    """Search for the best way to run a job: first the mix of hosts, then checkpoints and policies.

    Without sets of policies, those of :func:`worth_trying` are tried.

    Returns:
        the last candidates, the best first, with two mixes of hosts among them if there are two; and all mixes of
        hosts, with few seeds.
    """
    few = min(FEW_SEEDS, seeds)
    tried = _ordered(mixes(scenario), goal, simulate, few)
    ways = [way for candidate in tried[:MOST_FINALISTS] for way in _ways(candidate.scenario, step_s, policies)]
    last = _finalists(_ordered(ways, goal, simulate, few))
    return _ordered([candidate.scenario for candidate in last], goal, simulate, seeds), tried


def _finalists(ordered: Sequence[Candidate]) -> Sequence[Candidate]:
    """The best candidates; the last place is for the best one with other hosts, so that its cost is shown."""
    finalists = ordered[:MOST_FINALISTS]
    other = next((candidate for candidate in ordered if candidate.hosts != ordered[0].hosts), None)
    return finalists if other is None or other in finalists else [*finalists[:-1], other]


def _ordered(scenarios: Sequence[Scenario], goal: Goal, simulate: Simulate, seeds: int) -> list[Candidate]:
    """Simulated candidates, the best first; of two equally good ones, the one with fewer policies comes first."""
    candidates = map(Candidate, scenarios, simulate(scenarios, seeds))
    return sorted(candidates, key=lambda candidate: (*goal.key(candidate.answer), len(candidate.scenario.job.policies)))


def frontier(tried: Sequence[Candidate]) -> list[Candidate]:
    """The candidates than which no other is better in both time and cost, the fastest first."""
    best: list[Candidate] = []
    for candidate in sorted(tried, key=lambda candidate: (candidate.answer.seconds.p50, candidate.answer.cost.p50)):
        if math.isfinite(candidate.answer.seconds.p50) and (
            not best or candidate.answer.cost.p50 < best[-1].answer.cost.p50
        ):
            best.append(candidate)
    return best


def mixes(scenario: Scenario) -> list[Scenario]:
    """All mixes of hosts to try: of each kind none, a quarter, half, three quarters or all; fewer with many kinds."""
    kinds = len(scenario.hosts)
    shares = next(
        option
        for option in (SHARES, SHARES[::2], SHARES[::4])
        if len(option) ** kinds <= MOST_MIXES or len(option) == 2
    )
    counts = [sorted({round(share * kind.count) for share in shares}) for kind in scenario.hosts]
    scenarios = []
    for chosen in product(*counts):
        counted = zip(scenario.hosts, chosen, strict=True)
        mix = replace(scenario, hosts=[kind.model_copy(update={"count": count}) for kind, count in counted])
        if mix.room >= scenario.job.fewest:
            scenarios.append(mix)
    return scenarios


def _ways(scenario: Scenario, step_s: float, policies: Sequence[tuple[str, ...]]) -> list[Scenario]:
    """Scenarios with the same hosts, and other checkpoints and policies."""
    every = {scenario.job.checkpoint_every, *(max(1, round(seconds / step_s)) for seconds in INTERVALS_S)}
    return [
        scenario.run_with(checkpoint_every=steps, policies=names)
        for steps, names in product(sorted(every), policies or worth_trying(scenario))
    ]


def worth_trying(scenario: Scenario) -> list[tuple[str, ...]]:
    """Sets of policies that may change time or cost: none, the scenario's own, and single ones.

    Single ones are ``spot`` if hosts may be taken away, ``straggler`` if they differ in speed, and ``goodput`` if the
    noise scale is given, since it changes the batch.
    """
    reasons = {
        "spot": any(kind.is_spot and kind.count for kind in scenario.hosts),
        "straggler": len({kind.speed for kind in scenario.hosts if kind.count}) > 1,
        "goodput": scenario.work.noise_scale is not None,
    }
    return [*dict.fromkeys([(), scenario.job.policies, *((name,) for name, holds in reasons.items() if holds)])]


# A simulation as a value: its settings, its answers, and the commands that start the job.


GUESS = 2.0
"""The factor by which figures that were not measured are multiplied and divided, to see whether they matter."""

GUESS_SEEDS = 4
"""The number of seeds for each of these figures."""

LONGEST, LONGEST_ALONE = 20.0, 2.0
"""A job is given up after this multiple of the deadline, or of its time with the slowest number of workers."""

SMALLEST_EFFECT = 0.005
"""The relative change of a median above which a guess is reported."""


PORT = 7777
"""The port of the coordinator in the commands."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The same job with other policies."""

    name: str
    answer: Expectation
    outcomes: Sequence[SimulatedOutcome]


@dataclass(frozen=True, slots=True)
class Guess:
    """The change of time and cost if a figure that was not measured had another value.

    Attributes:
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
    """The answers of a simulation.

    Attributes:
        candidates: the best ways to run the job; empty if they were not searched for.
        tried: all mixes of hosts that the search has tried, with few seeds.
    """

    scenario: Scenario
    goal: Goal
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
    """The settings of a simulation.

    Attributes:
        policies: the sets of policies to compare, and to search among; empty to simulate the scenario's own, and to
            search among all that may matter.
    """

    goal: Goal = field(default_factory=Goal)
    policies: Sequence[tuple[str, ...]] = ()
    seeds: int = 40
    first_seed: int = 0
    processes: int = 1
    searches: bool = False

    def answer(self, outcomes: Sequence[SimulatedOutcome]) -> Expectation:
        """The statistics of one scenario's outcomes, with these limits."""
        return answer(outcomes, self.goal.deadline_s, self.goal.budget)


def until_s(scenario: Scenario, deadline_s: float | None) -> float:
    """The virtual seconds after which a job is given up."""
    speed = min(1.0, *(kind.speed for kind in scenario.hosts if kind.count))
    slowest = speed * min(rate.samples_per_s for rate in rates(scenario, scenario.room))
    return max(LONGEST * (deadline_s or 0.0), LONGEST_ALONE * scenario.work.samples / slowest, 86_400.0)


def simulation(scenario: Scenario, settings: SimulationSettings) -> Simulation:
    """Simulate a scenario.

    Raises:
        JobError: a policy is unknown, a trace cannot be read, or the simulated job fails.
    """
    chosen = settings.policies or [scenario.job.policies]
    for names in chosen:
        require_named(names, [*NAMED, SPOT], "policy", "--policies" if settings.policies else "job.policies")
    scenarios = [scenario.run_with(policies=names) for names in chosen]
    cache = OutcomeCache(settings.first_seed, until_s(scenario, settings.goal.deadline_s), settings.processes)
    outcomes = cache.of(scenarios, settings.seeds)
    variants = [
        Variant(", ".join(names) or "no policies", settings.answer(of_variant), of_variant)
        for names, of_variant in zip(chosen, outcomes, strict=True)
    ]
    if not any(outcome.done for variant in variants for outcome in variant.outcomes):
        raise JobError(
            "the job is not done in any of the seeds: its hosts are available too seldom, or its checkpoints too far "
            "apart (job.checkpoint_every), so that steps are lost again and again"
        )

    def simulate(scenarios: Sequence[Scenario], seeds: int) -> list[Expectation]:
        return [settings.answer(of_scenario) for of_scenario in cache.of(scenarios, seeds)]

    speeds = rates(scenario, scenario.room)
    step_s = scenario.work.batch_size / speeds[-1].samples_per_s
    guesses = _guesses(scenario, simulate, min(GUESS_SEEDS, settings.seeds))
    if not settings.searches:
        return Simulation(scenario, settings.goal, variants, speeds, guesses)
    best, tried = search(scenario, settings.goal, simulate, settings.seeds, step_s, settings.policies)
    return Simulation(scenario, settings.goal, variants, speeds, guesses, best, tried)


def _guesses(scenario: Scenario, simulate: Simulate, seeds: int) -> list[Guess]:
    """The effects of default figures at half and at double their values, with the same few seeds."""
    figures = scenario.figures()
    names = [name for name, source in scenario.sources.items() if source == "default" and figures[name]]
    tried = [(name, factor) for name in names if name != "gamma" for factor in (1 / GUESS, GUESS)]
    if not tried:
        return []
    scenarios = [scenario, *(scenario.scaled(name, factor) for name, factor in tried)]
    base, *others = simulate(scenarios, seeds)
    guesses = []
    for (name, factor), other in zip(tried, others, strict=True):
        seconds, cost = _times(other.seconds.p50, base.seconds.p50), _times(other.cost.p50, base.cost.p50)
        if abs(seconds - 1) > SMALLEST_EFFECT or abs(cost - 1) > SMALLEST_EFFECT:
            guesses.append(Guess(name, figures[name], factor, seconds, cost))
    return guesses


def _times(value: float, reference: float) -> float:
    return 1.0 if not reference or not math.isfinite(value) or not math.isfinite(reference) else value / reference


@dataclass(frozen=True, slots=True)
class HostCommand:
    """A command for some hosts.

    Attributes:
        hosts: the hosts as text: ``each of 3 spot hosts``.
    """

    hosts: str
    words: str


def commands(scenario: Scenario) -> list[HostCommand]:
    """The commands of the first host, which has the coordinator, and of the others. A host that stays comes first."""
    kinds = sorted((kind for kind in scenario.hosts if kind.count), key=lambda kind: kind.is_spot)
    if not kinds:
        return []
    first, *others = kinds
    more = [(first, first.count - 1, "other "), *((kind, kind.count, "") for kind in others)]
    joins = [HostCommand(_hosts(kind, count, word), _join(scenario, kind)) for kind, count, word in more if count]
    return [HostCommand(f"one {first.name} host", _run(scenario, first, alone=not joins)), *joins]


def left_out(scenario: Scenario) -> list[str]:
    """Sentences about what was simulated, and is not in the commands."""
    spot = [kind for kind in scenario.hosts if kind.count and kind.is_spot]
    sentences = []
    if spot:
        names = " or ".join(kind.name for kind in spot)
        sentences.append(f"A {names} host that comes back has to run its command again when it starts.")
    if spot and len(spot) == sum(kind.count > 0 for kind in scenario.hosts):
        sentences.append(
            "All hosts may be taken away. The simulation loses no coordinator, and starts a job again that all hosts "
            "have left: run the coordinator with --here 0 on a host that stays, and unisono run again when it ends."
        )
    if (begin := scenario.job.begin_with) is not None and begin < scenario.room:
        sentences.append(f"The simulated job begins with {begin} workers: ask for them with unisono resize {begin}.")
    if "spot" in scenario.job.policies:
        sentences.append(
            "The commands have no policy spot: unisono.SpotPolicy needs a market, which the script passes to it."
        )
    return sentences


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
    """The options of both commands: those of all workers, and the notices of these hosts."""
    job = scenario.job
    words = ["--failure-timeout-s", f"{job.failure_timeout_s:g}", "--shards", str(scenario.work.shards)]
    words += ["--checkpoint-every", str(job.checkpoint_every)] if job.checkpoint_every else []
    words += [word for name in job.policies if name != "spot" for word in ("--policy", name)]
    return [*words, *(["--notices", "auto"] if kind.is_spot and kind.notice_s else [])]


def as_json(simulation: Simulation) -> Mapping[str, object]:
    """All answers as values for JSON; infinite ones are None."""
    return {
        "extrapolation": simulation.is_extrapolation,
        "measured_to": simulation.scenario.measured_to,
        "variants": [{"policies": variant.name, **_written(variant.answer)} for variant in simulation.variants],
        "rates": [asdict(rate) for rate in simulation.rates],
        "figures": {
            name: {"value": value, "source": simulation.scenario.sources.get(name, "default")}
            for name, value in simulation.scenario.figures().items()
        },
        "guesses": [
            {
                "figure": guess.name,
                "value": guess.value,
                "factor": guess.factor,
                "time": guess.seconds,
                "cost": guess.cost,
            }
            for guess in simulation.guesses
        ],
        "candidates": [
            {
                **_way(candidate),
                "commands": [
                    {"hosts": command.hosts, "command": command.words} for command in commands(candidate.scenario)
                ],
                "left_out": left_out(candidate.scenario),
                "holds": simulation.goal.holds(candidate.answer),
                **_written(candidate.answer),
            }
            for candidate in simulation.candidates
        ],
        "margins": [
            {**_way(margin.next), "more": _finite(margin.share), "holds": margin.holds}
            for margin in margins(simulation.candidates, simulation.goal)
        ],
    }


def _way(candidate: Candidate) -> dict[str, object]:
    job = candidate.scenario.job
    return {"hosts": candidate.hosts, "checkpoint_every": job.checkpoint_every, "policies": list(job.policies)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _written(answer: Expectation) -> dict[str, object]:
    budget = answer.in_budget
    return {
        "seeds": answer.seeds,
        "seconds_p50": _finite(answer.seconds.p50),
        "seconds_p95": _finite(answer.seconds.p95),
        "cost_p50": answer.cost.p50,
        "cost_p95": answer.cost.p95,
        "in_time": answer.in_time.share,
        "in_time_95": [answer.in_time.low, answer.in_time.high],
        "in_budget": budget and budget.share,
        "in_budget_95": budget and [budget.low, budget.high],
        "lost_s": dict(answer.lost),
        "losses": answer.losses,
    }
