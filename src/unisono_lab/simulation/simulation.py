"""A simulation as a value: what was asked, all that is answered, and the commands that start the job."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from unisono.adapt.named import NAMED
from unisono.errors import JobError
from unisono.named import require_named
from unisono_lab.simulation.coordination import MOST_RESTARTS
from unisono_lab.simulation.scenario import HostKind, Scenario
from unisono_lab.simulation.search import (
    Candidate,
    Expectation,
    Goal,
    Simulate,
    WorkerRate,
    answer,
    margins,
    rates,
    search,
)
from unisono_lab.simulation.seeds import KnownOutcomes
from unisono_lab.simulation.simulated_run import SimulatedOutcome
from unisono_lab.simulation.training import SPOT

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
