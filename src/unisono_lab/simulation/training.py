"""How far a simulated training has come, how long its steps take, and what its policies see and decide."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import starmap
from math import inf

import numpy as np
from numpy.typing import NDArray

from unisono.adapt.layout_policies import SpotPolicy
from unisono.adapt.layout_trials import Layout
from unisono.adapt.named import policies_named
from unisono.adapt.norms import Noise
from unisono.adapt.view import BatchShape, Decision, Policy, Timings, View
from unisono.plan.split import Split
from unisono.plan.topology import Plan, Transfer, plan
from unisono.train.state.policy_state import Hook, PolicyState, observed
from unisono_lab.simulation.scenario import NamedNetwork, Scenario

# How long the messages of a plan take: latency, and bytes over bandwidth.


Way = tuple[int, int]
"""From one worker to another."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What reducing one bucket comes to.

    Attributes:
        rounds: the number of rounds, one after the other.
        messages: the number of messages of all workers.
        most_bytes: the most bytes that any worker sends, or receives.
        seconds: the seconds until all workers have the sum.
    """

    rounds: int
    messages: int
    most_bytes: float
    seconds: float


def forecast(graph: Plan, size: float, latency_s: float, bytes_per_s: float) -> Forecast:
    """What becomes of a plan on a network where each worker has one connection, to a switch that is faster.

    A message takes the latency, and its bytes over the bandwidth that it gets (Hockney, Parallel Computing 20, 1994).
    Messages from one worker to another follow each other; those that share a worker's connection share its bandwidth
    evenly, each way by itself (max-min fairness; Bertsekas and Gallager, Data Networks, 6.5.2). Adding costs nothing.

    Args:
        graph: the plan of who sends what to whom.
        size: the bytes of the bucket, cut into equal pieces.
        latency_s: the seconds of a message without contents.
        bytes_per_s: the bandwidth of a worker's connection, each way.
    """
    piece = size / graph.pieces if graph.pieces else 0.0
    loads: Counter[tuple[str, int]] = Counter()
    for message in graph.messages:
        loads["sends", message.sender] += len(message.nodes)
        loads["receives", message.receiver] += len(message.nodes)
    return Forecast(
        rounds=len(graph.rounds),
        messages=sum(len(message.nodes) for message in graph.messages),
        most_bytes=piece * max(loads.values(), default=0),
        seconds=_seconds(graph, piece, latency_s, bytes_per_s),
    )


def _seconds(graph: Plan, piece: float, latency_s: float, bytes_per_s: float) -> float:
    workers = _Workers(graph)
    left: dict[Transfer, float] = defaultdict(lambda: 1.0)  # the share that has yet to be sent
    under_way: deque[tuple[float, Transfer]] = deque()  # sent, and there at that time
    now = 0.0
    while workers.ways or under_way:
        rates = _fair_rates(workers.ways, bytes_per_s)
        heads = {
            workers.ways[way][0]: rate / max(piece * len(workers.ways[way][0].nodes), 1e-9)
            for way, rate in rates.items()
        }
        sent_in = min((left[message] / rate for message, rate in heads.items()), default=inf)
        there_in = under_way[0][0] - now if under_way else inf
        step = min(sent_in, there_in)
        now += step
        for message, rate in heads.items():
            left[message] -= rate * step
            if left[message] < 1e-9:
                workers.sent(message)
                under_way.append((now + latency_s, message))
        while under_way and under_way[0][0] <= now + 1e-12:
            workers.receive(under_way.popleft()[1])
    return now


class _Workers:
    """How far all workers have come in their turns, and what waits on each way for its time to be sent."""

    def __init__(self, graph: Plan) -> None:
        self._turns = [deque(graph.turns(rank)) for rank in range(graph.split.workers)]
        self._here: set[Transfer | None] = {None}
        self.ways: dict[Way, deque[Transfer]] = {}
        for rank in range(graph.split.workers):
            self._take_turns(rank)

    def sent(self, message: Transfer) -> None:
        """The next one on this way comes to its time."""
        way = message.sender, message.receiver
        self.ways[way].popleft()
        if not self.ways[way]:
            del self.ways[way]

    def receive(self, message: Transfer) -> None:
        """It is there."""
        self._here.add(message)
        self._take_turns(message.receiver)

    def _take_turns(self, rank: int) -> None:
        turns = self._turns[rank]
        while turns and turns[0].received in self._here:
            for message in turns.popleft().sends:
                self.ways.setdefault((message.sender, message.receiver), deque()).append(message)


def _fair_rates(ways: Collection[Way], bytes_per_s: float) -> dict[Way, float]:
    """The tightest connection shares what it has among those that need it; then the next, with what is left."""
    rates: dict[Way, float] = {}
    free: dict[tuple[int, int], float] = defaultdict(lambda: bytes_per_s)  # by worker, and 0 to send or 1 to receive
    while len(rates) < len(ways):
        needs = Counter((rank, end) for way in ways if way not in rates for end, rank in enumerate(way))
        tightest = min(needs, key=lambda one: free[one] / needs[one])
        rate = free[tightest] / needs[tightest]
        for way in ways:
            if way not in rates and way[tightest[1]] == tightest[0]:
                rates[way] = rate
                for end, rank in enumerate(way):
                    free[rank, end] -= rate
    return rates


# How far a simulated training has come, how long its steps take, and what its policies see and decide.


SPOT = "spot"
"""The policy that sees the simulated market, which none of the command line does."""

CHUNK = 1024
"""Steps that are drawn at once where no policy looks at each."""

MOST_AGAIN = 20
"""Times the steps that the work takes: a job that has done more of them, again and again, is given up."""

BY_STEP = frozenset({"noise-scale"})
"""Policies that look at each so many steps, and follow up in each of the next: they are asked after all."""

LONGEST_STRIDE = 2**16
"""Steps from one question to the policies to the next at most: all of them are drawn at once."""

Market = Callable[[], Mapping[str, float | int | None]]

Array = NDArray[np.float64]

BEYOND = (4, 8, 16)
"""Numbers of workers of which messages are looked at one by one; larger numbers go on as these do."""

PIECES = 4
"""Pieces of a bucket, where one comes back while the next is on its way there."""


@dataclass(frozen=True, slots=True)
class TrainedSoFar:
    """What a checkpoint holds.

    Attributes:
        steps: steps done.
        samples: samples done, each counted by what it brings beside one of the first batch.
        trained_s: seconds of training that led there.
    """

    steps: int = 0
    samples: float = 0.0
    trained_s: float = 0.0


class SimulatedTraining:
    """The work of a job, over all its starts.

    Args:
        scenario: the scenario.
        clock: draws the seconds of steps.
        market: says price and notices, for the policy ``spot``.

    Attributes:
        now: the progress so far.
        stopped: whether a policy has ended it.
    """

    def __init__(self, scenario: Scenario, clock: StepClock, market: Market) -> None:
        self._scenario, self._clock = scenario, clock
        self._work, self._every = scenario.work, scenario.job.checkpoint_every
        self._policies = PolicyState(_policies(scenario, market), self._work.batch_size, self._work.shards)
        self._noise = None if self._work.noise_scale is None else Noise(self._work.noise_scale, 1.0)
        self.now = TrainedSoFar()
        self.stopped = False
        self._checkpoints: list[tuple[float, TrainedSoFar]] = [(0.0, self.now)]
        self._steady, self._asked_at = 0, 0
        self._stride = 1
        self._done = 0  # steps, with those that were lost

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to do."""
        return self.stopped or self.now.samples >= self._work.samples

    @property
    def is_endless(self) -> bool:
        """Whether so many steps were lost that nobody would wait for the end."""
        return self._done * self._work.batch_size > MOST_AGAIN * (self._work.samples + self._work.batch_size)

    @property
    def asks(self) -> bool:
        """Whether policies look at each step."""
        return not self._policies.is_empty

    @property
    def balances(self) -> bool:
        """Whether shards are to be split by speed."""
        return self._policies.balances

    def shard_seconds(self, crew: Crew) -> list[float]:
        """Seconds of a shard, of each load of a crew; 0 of one without shards."""
        return [busy_s / max(1, load.shards) for load, busy_s in self._busy(crew)]

    @property
    def per_step(self) -> float:
        """Samples that a step brings."""
        batch = self._policies.batch_size
        return batch * (1.0 if self._noise is None else self._noise.efficiency(self._work.batch_size, batch))

    def ahead(self) -> int:
        """How many steps can be drawn at once."""
        left = -(-(self._work.samples - self.now.samples) // self.per_step)
        return max(1, min(self._stride if self.asks else CHUNK, int(left)))

    def draw(self, crew: Crew, steps: int) -> tuple[Array, Array]:
        """Seconds of the next steps, and of the checkpoints in each."""
        seconds = self._clock.draw(self._cut(crew), self._policies.shape, steps)
        every_s = 0.0 if BY_STEP.intersection(self._scenario.job.policies) else self._scenario.job.ask_every_s
        self._stride = max(1, int(min(LONGEST_STRIDE, every_s / float(seconds[-1]))))
        numbers = np.arange(self.now.steps + 1, self.now.steps + steps + 1)
        due = numbers % self._every == 0 if self._every else np.zeros(steps, dtype=bool)
        return seconds, np.where(due, self._scenario.seconds.stall_s, 0.0)

    def commit(self, steps: int, seconds: float, at_s: float) -> None:
        """Steps are done: note it, and the newest checkpoint among them.

        Args:
            steps: the number of steps.
            seconds: the seconds that they took together.
            at_s: the moment at which the last of them was done.
        """
        if not steps:
            return
        self._done += steps
        before, per_step, mean_s = self.now, self.per_step, seconds / steps
        self.now = TrainedSoFar(before.steps + steps, before.samples + steps * per_step, before.trained_s + seconds)
        self._steady += steps
        if self._every and (behind := self.now.steps % self._every) < steps:
            there = TrainedSoFar(
                self.now.steps - behind, self.now.samples - behind * per_step, self.now.trained_s - behind * mean_s
            )
            self._keep(there, at_s - behind * mean_s)

    def keep(self, at_s: float) -> None:
        """A checkpoint of all that is done is whole at a moment."""
        self._checkpoints.append((at_s, self.now))

    def fall_back(self, at_s: float) -> float:
        """All who held the state are lost: back to the newest checkpoint that was whole then; the seconds lost."""
        whole = [kept for moment, kept in self._checkpoints if moment <= at_s]
        lost, self.now = self.now.trained_s - whole[-1].trained_s, whole[-1]
        self._asked_at = min(self._asked_at, self.now.steps)
        self._checkpoints = [(moment, kept) for moment, kept in self._checkpoints if kept.steps <= self.now.steps]
        return lost

    def unsettled(self) -> None:
        """The workers are others than before."""
        self._steady = 0

    def ask(self, crew: Crew, seconds: float, generation: int, departures: int) -> list[Decision]:
        """What policies decide after a step, and take it into account."""
        view = self._view(crew, seconds, generation, departures)
        for policy in self._policies.policies:
            every = policy.observe_every
            if every and view.step // every > self._asked_at // every:
                self._policies.observed[policy.name] = observed(policy, view)
        self._asked_at = view.step
        view = replace(view, observed=dict(self._policies.observed))
        hooks: tuple[Hook, ...] = ("after_step",)
        if not self._policies.has_begun:
            self._policies.has_begun, hooks = True, ("before_train", "after_step")
        decisions = [one for hook in hooks for one in self._policies.ask(hook, view)]
        shape = self._policies.shape
        self._policies.take(decisions, view, loop=0)
        if self._policies.shape != shape:
            self._steady = 0
        self.stopped = any(one.verb == "stop" for one in decisions)
        return decisions

    def _keep(self, what: TrainedSoFar, written_at: float) -> None:
        self._checkpoints.append((written_at + self._scenario.seconds.checkpoint_s, what))
        del self._checkpoints[1:-8]  # older ones are gone from the disk, too

    def _cut(self, crew: Crew) -> Crew:
        """What workers compute now that a policy may have cut the batch finer."""
        times = self._policies.shape.shards // self._work.shards
        return crew.finer(times) if times > 1 else crew

    def _busy(self, crew: Crew) -> Iterable[tuple[Load, float]]:
        """Each load of a crew, as policies have cut it, with the seconds that it computes."""
        cut = self._cut(crew)
        return zip(cut.loads, self._clock.typical(cut, self._policies.shape), strict=True)

    def _view(self, crew: Crew, seconds: float, generation: int, departures: int) -> View:
        shape, took = self._policies.shape, self._scenario.seconds
        timings = [
            Timings(
                shard_s=busy_s / load.shards,
                step_s=seconds,
                exposed_s=max(0.0, seconds - busy_s),
                formed_s=took.forming(len(crew.places)),
                checkpoint_s=took.checkpoint_s,
            )
            if load.shards
            else Timings(step_s=seconds)
            for load, busy_s in self._busy(crew)
        ]
        return View(
            step=self.now.steps,
            epoch=0,
            samples=int(self.now.samples),
            batch_size=shape.samples,
            base_batch_size=self._work.batch_size,
            shards=shape.shards,
            base_shards=self._work.shards,
            world_size=len(crew.places),
            learning_rate=self._policies.rate,
            noise=self._noise,
            workers=tuple([timings[place] for place in crew.places]),
            steady=self._steady,
            seconds=self.now.trained_s,
            generation=generation,
            departures=departures,
        )


def _policies(scenario: Scenario, market: Market) -> list[Policy]:
    """New ones, that nobody has asked yet."""
    names = [name for name in scenario.job.policies if name != SPOT]
    others = policies_named(names, scenario.work.batch_size, "--policies or job.policies")
    if SPOT not in scenario.job.policies:
        return others
    return [SpotPolicy(market, budget=scenario.job.spot_budget, fewest=scenario.job.fewest), *others]


# -- how long steps take


@dataclass(frozen=True, slots=True)
class Load:
    """What workers that are alike have to compute.

    Attributes:
        speed: their speed, as a multiple of that of the measured workers.
        shards: the shards of each.
    """

    speed: float
    shards: int


@dataclass(frozen=True, slots=True)
class Crew:
    """What the workers of a generation have to compute.

    Attributes:
        loads: the loads that there are, each once.
        counts: the number of workers with each of them.
        places: the place of each worker's load among them, by rank.
    """

    loads: tuple[Load, ...]
    counts: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, loads: Sequence[tuple[float, int]]) -> Crew:
        """Of the speed and the shards of all workers, by rank."""
        counts = Counter(loads)
        known = {load: place for place, load in enumerate(counts)}
        return cls(tuple(starmap(Load, counts)), tuple(counts.values()), tuple([known[load] for load in loads]))

    def finer(self, times: int) -> Crew:
        """The same with each shard cut into so many."""
        return replace(self, loads=tuple(Load(load.speed, load.shards * times) for load in self.loads))


class StepClock:
    """Draws the seconds of steps.

    The slowest worker counts: of n workers alike, with times that are log-normal, the largest is drawn at once, by the
    inverse of its distribution, Φ⁻¹(U^(1/n)). So a step costs the same however many workers there are.

    Args:
        scenario: the scenario.
        chance: the source of chance.
    """

    def __init__(self, scenario: Scenario, chance: np.random.Generator) -> None:
        self._scenario, self._chance = scenario, chance
        self._known: dict[tuple[Load, int, float], float] = {}

    def draw(self, crew: Crew, shape: BatchShape, steps: int) -> Array:
        """Seconds of each of so many steps of a batch."""
        groups = zip(crew.counts, crew.loads, self.typical(crew, shape), strict=True)
        times = [self._slowest(seconds, count, steps) for count, load, seconds in groups if load.shards]
        found: Array = np.maximum.reduce(times)
        return found

    def typical(self, crew: Crew, shape: BatchShape) -> list[float]:
        """Seconds of a step without chance, of each load of a crew; 0 of one without shards."""
        samples, workers = shape.samples / shape.shards, len(crew.places)
        return [self._seconds(load, workers, samples) if load.shards else 0.0 for load in crew.loads]

    def _slowest(self, seconds: float, count: int, steps: int) -> Array:
        if not self._scenario.seconds.jitter:
            return np.full(steps, seconds)
        from scipy.special import ndtri  # takes a moment to load

        slowest = ndtri(self._chance.random(steps) ** (1 / count))
        # The median of the jitter is 1: what was fitted are medians of whole steps of few workers.
        found: Array = seconds * np.exp(self._scenario.seconds.jitter * slowest)
        return found

    def _seconds(self, load: Load, workers: int, samples: float) -> float:
        key = load, workers, samples
        if key not in self._known:
            model, network = self._scenario.step, self._scenario.network
            if load.speed != 1.0:
                model = replace(model, a_c=model.a_c / load.speed, b_c=model.b_c / load.speed)
            if network is not None:
                model = replace(model, a_r=reduction_s(network, workers), b_r=0.0)
            # A layout in which the widest worker has this many shards of this size.
            layout = Layout(workers, round(samples * workers * load.shards), workers * load.shards)
            self._known[key] = model.seconds(layout)
        return self._known[key]


def reduction_s(network: NamedNetwork, workers: int) -> float:
    """Seconds of a reduction, as if all gradients were one bucket; 0 for one worker."""
    if workers <= BEYOND[-1]:
        return _forecast(network, workers)
    rows = [_terms(network.topology, known) for known in BEYOND]
    parts = np.linalg.solve(np.array(rows), np.array([_forecast(network, known) for known in BEYOND]))
    return max(float(np.dot(_terms(network.topology, workers), parts)), _forecast(network, BEYOND[-1]))


def _terms(topology: str, workers: int) -> tuple[float, float, float]:
    """What a reduction is made of: a part for all, one for each round, and the share that a worker need not send."""
    return 1.0, math.log2(workers) if topology == "tree" else float(workers), 1 / workers


@cache
def _forecast(network: NamedNetwork, workers: int) -> float:
    if workers < 2:
        return 0.0
    pieces = workers if network.topology in ("direct", "ring") else PIECES
    graph = plan(Split.even(workers, workers), network.topology, pieces)
    return forecast(graph, network.gradient_bytes, network.latency_s, network.bytes_per_s).seconds
