"""One simulated job, from its first host to its end, drawn from one seed."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from tempfile import TemporaryFile

import numpy as np
from pydantic import TypeAdapter, ValidationError

from unisono.errors import JobError, UnisonoError
from unisono.host.process import end_with_parent
from unisono_lab.simulation.coordination import Coordination, Course, Host
from unisono_lab.simulation.market import MarketTrace, Supply, changes_per_s, supply
from unisono_lab.simulation.scenario import Incident, Scenario
from unisono_lab.simulation.simulated_training import SimulatedTraining, StepClock

MOST_MARKS, MANY_MARKS = 2000, 100_000
"""The most changes of workers or price that are kept: in the outcome, for charts; and while the job runs."""

FEW_CHANGES, MOST_CHANGES = 1e5, 3e6
"""The changes of the market that are drawn at first, and the most in all: a job that needs more is given up."""

FURTHER = 8.0
"""The factor by which the drawn time of the market grows if the job is not done in it."""

COLLECTED_EACH = (300_000, 20, 100)
"""The thresholds of Python's garbage collector during a simulation."""


@dataclass(frozen=True, slots=True)
class SizeChange:
    """A moment at which the number of workers, or the price of a worker, changed."""

    seconds: float
    workers: int
    price: float
    samples: float


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """The outcome of one simulated job.

    Attributes:
        done: whether the work was done before the job was given up.
        seconds: the seconds until the job was done or given up.
        lost: the lost seconds, by cause: ``regroup``, ``waiting``, ``start``, ``repeated`` (steps that were computed
            again or broken off), ``checkpoints`` (pauses for them).
        losses: the number of times that workers were lost or left on notice.
        worker_seconds: seconds of training, times workers.
        marks: the changes of the number of workers, and of the price.
    """

    seed: int
    done: bool
    seconds: float
    cost: float
    lost: Mapping[str, float]
    steps: int
    losses: int
    generations: int
    worker_seconds: float
    marks: tuple[SizeChange, ...] = ()


def simulate(
    scenario: Scenario, seed: int, until_s: float, traces: Mapping[str, MarketTrace] | None = None
) -> SimulatedOutcome:
    """Simulate a job until it is done or given up. The same scenario and seed have the same outcome."""
    trace_of = traces or {}
    each_s = 1 / max(1e-300, sum(changes_per_s(kind, trace_of.get(kind.name)) for kind in scenario.hosts))
    until_s, drawn_s = min(until_s, MOST_CHANGES * each_s), FEW_CHANGES * each_s
    with _few_collections():
        while True:
            drawn_s = min(drawn_s, until_s)
            outcome = (run := _SimulatedRun(scenario, seed, drawn_s, trace_of)).play()
            if run.is_over or drawn_s == until_s:
                return outcome
            drawn_s *= FURTHER


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage less often: a simulation makes many objects and few cycles, and looking takes a third of it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(
        *(
            max(threshold, least) if threshold else 0
            for threshold, least in zip(thresholds, COLLECTED_EACH, strict=True)
        )
    )
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class _SimulatedRun(Course):
    def __init__(self, scenario: Scenario, seed: int, until_s: float, traces: Mapping[str, MarketTrace]) -> None:
        super().__init__()
        self._scenario, self._seed, self._until_s = scenario, seed, until_s
        clock = StepClock(scenario, np.random.default_rng(seed))
        self._training = SimulatedTraining(scenario, clock, self._market)
        self._supplies = [
            supply(kind, str(seed), until_s + kind.notice_s, traces.get(kind.name)) for kind in scenario.hosts
        ]
        self._there: dict[str, Host] = {}
        self._cost = 0.0
        self._since: dict[str, float] = {}  # the moments since which hosts are paid
        self._rented = {kind.name: Counter[str]() for kind in scenario.hosts}  # the number of available hosts, by zone
        self._marks: list[SizeChange] = []
        self._losses = self._generations = 0
        self._coordination = self._started()

    @property
    def is_over(self) -> bool:
        """Whether the job is done, or would never end."""
        return self._training.is_endless or self._training.is_done

    def play(self) -> SimulatedOutcome:
        for hosts in self._supplies:
            for number in range(len(hosts.stays)):
                self._expect(hosts, number)
            self._expect_price(iter(sorted({moment for prices in hosts.prices.values() for moment in prices.times})))
        for incident in self._scenario.incidents:
            self.at(incident.at_s, partial(self._inject, incident))
        while self.now <= self._until_s and not self._training.is_endless and self.go_on():
            if (over := self._coordination.state.over) is None:
                continue
            if over.digest:
                break
            if not over.preempted:
                raise JobError(f"the simulated job has failed after {self.now:.0f} s: {over.reason}")
            self._end_of_start()
        return self._outcome()

    # -- hosts

    def _expect(self, hosts: Supply, number: int, turn: int = 0) -> None:
        """Plan the next stay of a host."""
        if turn >= len(hosts.stays[number]):
            return
        stay = hosts.stays[number][turn]
        host = Host(f"{hosts.kind.name}-{number}.{turn}", hosts.kind, stay.zone, hosts.prices[stay.zone])
        self.at(stay.start, partial(self._host_appears, host))
        if math.isfinite(stay.end):
            if hosts.kind.notice_s:
                self.at(max(stay.start, stay.end - hosts.kind.notice_s), partial(self._warn_host, host))
            self.at(stay.end, partial(self._host_vanishes, host))
            self.at(stay.end, partial(self._expect, hosts, number, turn + 1))

    def _expect_price(self, times: Iterator[float]) -> None:
        """Plan the next moment at which a price changes."""
        if (moment := next(times, None)) is not None:
            self.at(moment, partial(self._price_changes, times))

    def _price_changes(self, times: Iterator[float]) -> None:
        if self._marks and self._price() != self._marks[-1].price:
            self._mark(self._marks[-1].workers)
        self._expect_price(times)

    def _host_appears(self, host: Host) -> None:
        if not self._marks and self.part == "waiting":
            self.turn("start")
        self._there[host.agent] = host
        self._wants(host, True)
        self._rented[host.kind.name][host.zone] += 1
        self.later(host.kind.boot_s, partial(self._agent_joins, host))

    def _agent_joins(self, host: Host) -> None:
        if host.agent in self._there and not host.noticed and self._coordination.state.over is None:
            self._coordination.join(host)

    def _warn_host(self, host: Host) -> None:
        host.noticed = True
        self._coordination.warn(host)

    def _host_vanishes(self, host: Host) -> None:
        del self._there[host.agent]
        self._wants(host, False)
        self._rented[host.kind.name][host.zone] -= 1
        self._coordination.vanish(host)

    def _wants(self, host: Host, is_wanted: bool) -> None:
        """Give a host back whose workers are not wanted, or rent it again when they are."""
        if is_wanted and host.agent in self._there:
            self._since.setdefault(host.agent, self.now)
        elif (since := self._since.pop(host.agent, None)) is not None:
            self._cost += host.prices.cost(since, self.now)

    def _inject(self, incident: Incident) -> None:
        self._coordination.befall(incident)

    def _market(self) -> Mapping[str, float | int | None]:
        noticed = (host.kind.workers for host in self._there.values() if host.noticed)
        return {"price": self._price(), "notices": sum(noticed)}

    def _price(self) -> float:
        """The price of a worker: the highest among hosts that may be taken away, or among all hosts if none may.

        For a kind without available hosts it is the price in the cheapest zone.
        """
        spot = [kind_supply for kind_supply in self._supplies if kind_supply.kind.is_spot] or self._supplies
        return max(self._dearest(kind_supply) / kind_supply.kind.workers for kind_supply in spot)

    def _dearest(self, hosts: Supply) -> float:
        prices = [hosts.prices[zone].at(self.now) for zone, count in self._rented[hosts.kind.name].items() if count]
        return max(prices, default=hosts.lowest(self.now))

    # -- starts of the job

    def _started(self) -> Coordination:
        return Coordination(self._scenario, self, self._training, self._mark, self._wants)

    def _end_of_start(self) -> None:
        """All workers have left: plan to start the job again."""
        self._note_start()
        self.turn("waiting")
        self._mark(0)
        self._coordination = self._started()
        self.later(self._scenario.seconds.again_s, self._join_again)

    def _join_again(self) -> None:
        for host in list(self._there.values()):
            if not host.noticed:
                self._coordination.join(host)

    def _note_start(self) -> None:
        self._losses += self._coordination.state.departures
        self._generations += self._coordination.state.generation

    # -- the outcome

    def _mark(self, workers: int) -> None:
        self._marks.append(SizeChange(self.now, workers, self._price(), self._training.now.samples))
        if len(self._marks) > MANY_MARKS:
            self._marks = self._marks[::2]

    def _outcome(self) -> SimulatedOutcome:
        self._note_start()
        self.turn(self.part)
        for agent in [*self._since]:
            self._wants(self._there[agent], False)
        self._mark(0)
        every = -(-len(self._marks) // MOST_MARKS)
        return SimulatedOutcome(
            seed=self._seed,
            done=self._training.is_done,
            seconds=self.now,
            cost=self._cost,
            lost=self.lost(),
            steps=self._training.now.steps,
            losses=self._losses,
            generations=self._generations,
            worker_seconds=self.worker_seconds,
            marks=tuple(self._marks[::every]),
        )


@dataclass(frozen=True, slots=True)
class Request:
    """Scenarios to simulate, each with every seed, until so many virtual seconds are over."""

    scenarios: tuple[Scenario, ...]
    seeds: tuple[int, ...]
    until_s: float


@dataclass(frozen=True, slots=True)
class SeedOutcomes:
    """The outcomes of each scenario, in the order of seeds; or an error message."""

    outcomes: tuple[tuple[SimulatedOutcome, ...], ...] = ()
    error: str = ""


SCENARIO: TypeAdapter[Scenario] = TypeAdapter(Scenario)
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
ANSWER: TypeAdapter[SeedOutcomes] = TypeAdapter(SeedOutcomes)


def outcomes(request: Request, processes: int) -> list[list[SimulatedOutcome]]:
    """The outcomes of each scenario, by seed; they do not depend on the number of processes.

    Raises:
        JobError: a trace cannot be read, or a simulated job has failed.
    """
    shares = [request.seeds[place::processes] for place in range(processes) if request.seeds[place::processes]]
    if len(shares) == 1:
        return [list(of_scenario) for of_scenario in _computed(request)]
    answers = _in_processes([Request(request.scenarios, share, request.until_s) for share in shares])
    by_scenario = zip(*(answer.outcomes for answer in answers), strict=True)
    return [sorted(chain.from_iterable(of_processes), key=lambda outcome: outcome.seed) for of_processes in by_scenario]


class OutcomeCache:
    """A cache of outcomes: no scenario is simulated twice with the same seed."""

    def __init__(self, first_seed: int, until_s: float, processes: int) -> None:
        self._first, self._until_s, self._processes = first_seed, until_s, processes
        self._outcomes: dict[bytes, list[SimulatedOutcome]] = {}

    def of(self, scenarios: Sequence[Scenario], seeds: int) -> list[list[SimulatedOutcome]]:
        """The outcomes of each scenario with the first seeds.

        Raises:
            JobError: a trace cannot be read, or a simulated job has failed.
        """
        keys = [SCENARIO.dump_json(scenario) for scenario in scenarios]
        missing: dict[int, dict[bytes, Scenario]] = {}
        for key, scenario in zip(keys, scenarios, strict=True):
            if (cached := len(self._outcomes.setdefault(key, []))) < seeds:
                missing.setdefault(cached, {})[key] = scenario
        for cached, by_key in missing.items():
            numbers = tuple(range(self._first + cached, self._first + seeds))
            request = Request(tuple(by_key.values()), numbers, self._until_s)
            for key, new in zip(by_key, outcomes(request, self._processes), strict=True):
                self._outcomes[key] += new
        return [self._outcomes[key][:seeds] for key in keys]


def _in_processes(requests: Sequence[Request]) -> list[SeedOutcomes]:
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    running = []
    with ExitStack() as stack:
        for request in requests:
            stdin = stack.enter_context(TemporaryFile())
            stdin.write(REQUEST.dump_json(request))
            stdin.seek(0)
            # In a process group of its own: Ctrl-C reaches this process alone, which kills the others.
            process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, close_fds=True, process_group=0)
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        return [_answer(process) for process in running]


def _answer(process: subprocess.Popen[bytes]) -> SeedOutcomes:
    assert process.stdout is not None
    try:
        answer = ANSWER.validate_json(process.stdout.read())
    except ValidationError as error:
        raise JobError(f"a process of the simulation ended with code {process.wait()}, without an answer") from error
    if answer.error:
        raise JobError(answer.error)
    return answer


def _computed(request: Request) -> tuple[tuple[SimulatedOutcome, ...], ...]:
    read = cache(MarketTrace.read)
    return tuple(
        tuple(simulate(scenario, seed, request.until_s, traces) for seed in request.seeds)
        for scenario in request.scenarios
        for traces in [{kind.name: read(kind.trace) for kind in scenario.hosts if kind.trace}]
    )


def main() -> None:
    """Read a request, and write the answer; ends when the parent process does."""
    end_with_parent(int(sys.argv[1]))
    try:
        answer = SeedOutcomes(_computed(REQUEST.validate_json(sys.stdin.buffer.read())))
    except UnisonoError as error:
        answer = SeedOutcomes(error=str(error))
    sys.stdout.buffer.write(ANSWER.dump_json(answer))


if __name__ == "__main__":
    main()
