"""One job, from its first host to its end, drawn by one seed."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from unisono.errors import JobError
from unisono_lab.simulation.coordination import Coordination, Course, Host
from unisono_lab.simulation.market import MarketTrace, Supply, changes_per_s, supply
from unisono_lab.simulation.scenario import Incident, Scenario
from unisono_lab.simulation.training import SimulatedTraining, StepClock

MOST_MARKS, MANY_MARKS = 2000, 100_000
"""Changes of the number of workers, or of the price, that are kept for pictures, and until the end."""

FEW_CHANGES, MOST_CHANGES = 1e5, 3e6
"""Changes of the market that are drawn at once, and in all: a job that is not done then is given up."""

FURTHER = 8.0
"""By which factor the market is drawn further if a job has not been done before."""

COLLECTED_EACH = (300_000, 20, 100)
"""Objects, and collections of younger ones, after which Python looks for cycles."""


@dataclass(frozen=True, slots=True)
class SizeChange:
    """A moment at which the number of workers, or the price of one, changed, for pictures."""

    seconds: float
    workers: int
    price: float
    samples: float


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """What became of one simulated job.

    Attributes:
        seed: the seed that it was drawn by.
        done: whether its work was done in the time that it was given.
        seconds: the seconds until then.
        cost: what all hosts cost.
        lost: seconds by what they were lost to: ``regroup``, ``waiting``, ``start``, ``repeated`` (steps computed
            again, and those that were broken off), ``checkpoints`` (what training stood still for them).
        steps: the number of steps.
        losses: the number of times that workers were lost or left on notice.
        generations: the number of generations.
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
    """Simulate a job. The same scenario and seed have the same outcome.

    Args:
        scenario: the scenario.
        seed: the seed of all that is drawn.
        until_s: the virtual seconds after which it is given up.
        traces: the traces of kinds of hosts, by their names.
    """
    known = traces or {}
    each_s = 1 / max(1e-300, sum(changes_per_s(kind, known.get(kind.name)) for kind in scenario.hosts))
    until_s, drawn_s = min(until_s, MOST_CHANGES * each_s), FEW_CHANGES * each_s
    with _few_collections():
        while True:
            drawn_s = min(drawn_s, until_s)
            outcome = (run := _SimulatedRun(scenario, seed, drawn_s, known)).play()
            if run.is_over or drawn_s == until_s:
                return outcome
            drawn_s *= FURTHER


@contextmanager
def _few_collections() -> Iterator[None]:
    """Rows of all workers come and go with each event, few of them in cycles: looking for these takes a third."""
    before = gc.get_threshold()
    gc.set_threshold(*(max(found, few) if found else 0 for found, few in zip(before, COLLECTED_EACH, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)


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
        self._since: dict[str, float] = {}  # hosts that are paid
        self._rented = {kind.name: Counter[str]() for kind in scenario.hosts}  # hosts that are there, by zone
        self._marks: list[SizeChange] = []
        self._losses = self._generations = 0
        self._coordination = self._started()

    @property
    def is_over(self) -> bool:
        """Whether more time would change nothing."""
        return self._training.is_endless or self._training.is_done

    def play(self) -> SimulatedOutcome:
        for given in self._supplies:
            for number in range(len(given.stays)):
                self._expect(given, number)
            self._expect_price(iter(sorted({at for prices in given.prices.values() for at in prices.times})))
        for incident in self._scenario.incidents:
            self.at(incident.at_s, partial(self._befalls, incident))
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

    def _expect(self, given: Supply, number: int, turn: int = 0) -> None:
        """Plan the next time for which a host is there."""
        if turn >= len(given.stays[number]):
            return
        stay = given.stays[number][turn]
        host = Host(f"{given.kind.name}-{number}.{turn}", given.kind, stay.zone, given.prices[stay.zone])
        self.at(stay.start, partial(self._comes, host))
        if math.isfinite(stay.end):
            if given.kind.notice_s:
                self.at(max(stay.start, stay.end - given.kind.notice_s), partial(self._is_warned, host))
            self.at(stay.end, partial(self._goes, host))
            self.at(stay.end, partial(self._expect, given, number, turn + 1))

    def _expect_price(self, times: Iterator[float]) -> None:
        """Plan the next moment at which a price changes."""
        if (moment := next(times, None)) is not None:
            self.at(moment, partial(self._price_changes, times))

    def _price_changes(self, times: Iterator[float]) -> None:
        if self._marks and self._price() != self._marks[-1].price:
            self._mark(self._marks[-1].workers)
        self._expect_price(times)

    def _comes(self, host: Host) -> None:
        if not self._marks and self.part == "waiting":
            self.turn("start")
        self._there[host.agent] = host
        self._wants(host, True)
        self._rented[host.kind.name][host.zone] += 1
        self.later(host.kind.boot_s, partial(self._joins, host))

    def _joins(self, host: Host) -> None:
        if host.agent in self._there and not host.noticed and self._coordination.state.over is None:
            self._coordination.join(host)

    def _is_warned(self, host: Host) -> None:
        host.noticed = True
        self._coordination.warn(host)

    def _goes(self, host: Host) -> None:
        del self._there[host.agent]
        self._wants(host, False)
        self._rented[host.kind.name][host.zone] -= 1
        self._coordination.vanish(host)

    def _wants(self, host: Host, wanted: bool) -> None:
        """A host whose workers nobody wants is given back, and rented again at once when somebody does."""
        if wanted and host.agent in self._there:
            self._since.setdefault(host.agent, self.now)
        elif (since := self._since.pop(host.agent, None)) is not None:
            self._cost += host.prices.cost(since, self.now)

    def _befalls(self, incident: Incident) -> None:
        self._coordination.befall(incident)

    def _market(self) -> Mapping[str, float | int | None]:
        noticed = (host.kind.workers for host in self._there.values() if host.noticed)
        return {"price": self._price(), "notices": sum(noticed)}

    def _price(self) -> float:
        """Of a worker, on the dearest host that may be taken away; of any host if none may.

        Of a kind of which no host is there it is the price in the cheapest zone.
        """
        spot = [one for one in self._supplies if one.kind.is_spot] or self._supplies
        return max(self._dearest(one) / one.kind.workers for one in spot)

    def _dearest(self, given: Supply) -> float:
        paid = [given.prices[zone].at(self.now) for zone, hosts in self._rented[given.kind.name].items() if hosts]
        return max(paid, default=given.lowest(self.now))

    # -- starts of the job

    def _started(self) -> Coordination:
        return Coordination(self._scenario, self, self._training, self._mark, self._wants)

    def _end_of_start(self) -> None:
        """All have left: the job is started again once there is room."""
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

    # -- what became of it

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
