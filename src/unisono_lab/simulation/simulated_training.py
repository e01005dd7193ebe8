"""The progress of a simulated training, the times of its steps, and the decisions of its policies."""

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
from unisono.adapt.layouts import Layout
from unisono.adapt.norms import Noise
from unisono.adapt.policy_names import policies_named
from unisono.adapt.view import BatchShape, Decision, Policy, Timings, View
from unisono.plan.split import Split
from unisono.plan.topology import Plan, Transfer, plan
from unisono.train.state.policy_state import Hook, PolicyState, observed
from unisono_lab.simulation.scenario import NamedNetwork, Scenario

# The time of a plan's messages: latency, and bytes over bandwidth.


Way = tuple[int, int]
"""The ranks of the sender and the receiver of messages."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of the reduction of one bucket.

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
    """Forecast a plan on a network in which each worker has one connection, to a switch that is faster.

    A message takes the latency, and its bytes over the bandwidth that it gets (Hockney, Parallel Computing 20, 1994).
    Messages from one worker to another follow each other; those that share a worker's connection share its bandwidth
    evenly, each way by itself (max-min fairness; Bertsekas and Gallager, Data Networks, 6.5.2). Adding takes no time.

    Args:
        graph: the plan of the reduction's messages.
        size: the bytes of the bucket, cut into equal pieces.
        latency_s: the seconds of an empty message.
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
    under_way: deque[tuple[float, Transfer]] = deque()  # sent, with the moments of arrival
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
    """The turns that workers have yet to take, and the messages that wait on each way."""

    def __init__(self, graph: Plan) -> None:
        self._turns = [deque(graph.turns(rank)) for rank in range(graph.split.workers)]
        self._here: set[Transfer | None] = {None}
        self.ways: dict[Way, deque[Transfer]] = {}
        for rank in range(graph.split.workers):
            self._take_turns(rank)

    def sent(self, message: Transfer) -> None:
        """Remove a message that was sent; the next one on its way follows."""
        way = message.sender, message.receiver
        self.ways[way].popleft()
        if not self.ways[way]:
            del self.ways[way]

    def receive(self, message: Transfer) -> None:
        """Let a message arrive."""
        self._here.add(message)
        self._take_turns(message.receiver)

    def _take_turns(self, rank: int) -> None:
        turns = self._turns[rank]
        while turns and turns[0].received in self._here:
            for message in turns.popleft().sends:
                self.ways.setdefault((message.sender, message.receiver), deque()).append(message)


def _fair_rates(ways: Collection[Way], bytes_per_s: float) -> dict[Way, float]:
    """The rates: the tightest connection is shared evenly; then the next one, with the bandwidth that is left."""
    rates: dict[Way, float] = {}
    free: dict[tuple[int, int], float] = defaultdict(lambda: bytes_per_s)  # by worker, and 0 to send or 1 to receive
    while len(rates) < len(ways):
        needs = Counter((rank, end) for way in ways if way not in rates for end, rank in enumerate(way))
        tightest = min(needs, key=lambda connection: free[connection] / needs[connection])
        rate = free[tightest] / needs[tightest]
        for way in ways:
            if way not in rates and way[tightest[1]] == tightest[0]:
                rates[way] = rate
                for end, rank in enumerate(way):
                    free[rank, end] -= rate
    return rates


# The progress of a simulated training, and the decisions of its policies.


SPOT = "spot"
"""The policy that reads the simulated market, which no policy of the command line can."""

CHUNK = 1024
"""The number of steps that are drawn at once if there are no policies."""

MOST_AGAIN = 20
"""A job that has computed this multiple of its work, because steps were lost again and again, is given up."""

BY_STEP = frozenset({"noise-scale"})
"""Policies that must be asked after every step."""

LONGEST_STRIDE = 2**16
"""The most steps between two questions to the policies, which are drawn at once."""

Market = Callable[[], Mapping[str, float | int | None]]

Array = NDArray[np.float64]

BEYOND = (4, 8, 16)
"""Numbers of workers whose messages are simulated one by one; larger numbers are extrapolated from them."""

PIECES = 4
"""The number of pieces of a bucket in topologies that pass pieces up and down at the same time."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The progress of a training, as in a checkpoint.

    Attributes:
        samples: the number of completed samples, each weighted by its worth relative to one of the first batch.
        trained_s: the seconds of training that led there.
    """

    steps: int = 0
    samples: float = 0.0
    trained_s: float = 0.0


class SimulatedTraining:
    """The work of a job, over all its starts.

    Args:
        clock: the source of the seconds of steps.
        market: a function that returns price and notices, for the policy ``spot``.

    Attributes:
        stopped: whether a policy has ended the training.
    """

    def __init__(self, scenario: Scenario, clock: StepClock, market: Market) -> None:
        self._scenario, self._clock = scenario, clock
        self._work, self._every = scenario.work, scenario.job.checkpoint_every
        self._policies = PolicyState(_policies(scenario, market), self._work.batch_size, self._work.shards)
        self._noise = None if self._work.noise_scale is None else Noise(self._work.noise_scale, 1.0)
        self.now = TrainingProgress()
        self.stopped = False
        self._checkpoints: list[tuple[float, TrainingProgress]] = [(0.0, self.now)]
        self._steady, self._asked_after_step = 0, 0
        self._stride = 1
        self._done = 0  # computed steps, including lost ones

    @property
    def is_done(self) -> bool:
        """Whether the work is done, or a policy has ended it."""
        return self.stopped or self.now.samples >= self._work.samples

    @property
    def is_endless(self) -> bool:
        """Whether so many steps were lost that the job is given up."""
        return self._done * self._work.batch_size > MOST_AGAIN * (self._work.samples + self._work.batch_size)

    @property
    def has_policies(self) -> bool:
        """Whether there are policies to ask."""
        return not self._policies.is_empty

    @property
    def balances(self) -> bool:
        """Whether shards are to be split by speed."""
        return self._policies.balances

    def shard_seconds(self, crew: Crew) -> list[float]:
        """The seconds of a shard for each load of a crew; 0 for a load without shards."""
        return [busy_s / max(1, load.shards) for load, busy_s in self._busy(crew)]

    @property
    def per_step(self) -> float:
        """The weighted samples of a step."""
        batch = self._policies.batch_size
        return batch * (1.0 if self._noise is None else self._noise.efficiency(self._work.batch_size, batch))

    def ahead(self) -> int:
        """The number of steps that can be drawn at once."""
        left = -(-(self._work.samples - self.now.samples) // self.per_step)
        return max(1, min(self._stride if self.has_policies else CHUNK, int(left)))

    def draw(self, crew: Crew, steps: int) -> tuple[Array, Array]:
        """Draw the seconds of the next steps, and those of the pauses for checkpoints in each."""
        seconds = self._clock.draw(self._cut(crew), self._policies.shape, steps)
        every_s = 0.0 if BY_STEP.intersection(self._scenario.job.policies) else self._scenario.job.ask_every_s
        self._stride = max(1, int(min(LONGEST_STRIDE, every_s / float(seconds[-1]))))
        numbers = np.arange(self.now.steps + 1, self.now.steps + steps + 1)
        due = numbers % self._every == 0 if self._every else np.zeros(steps, dtype=bool)
        return seconds, np.where(due, self._scenario.seconds.stall_s, 0.0)

    def commit(self, steps: int, seconds: float, at_s: float) -> None:
        """Count completed steps, of these seconds together, the last at ``at_s``, and the newest checkpoint of them."""
        if not steps:
            return
        self._done += steps
        before, per_step, mean_s = self.now, self.per_step, seconds / steps
        self.now = TrainingProgress(before.steps + steps, before.samples + steps * per_step, before.trained_s + seconds)
        self._steady += steps
        if self._every and (behind := self.now.steps % self._every) < steps:
            there = TrainingProgress(
                self.now.steps - behind, self.now.samples - behind * per_step, self.now.trained_s - behind * mean_s
            )
            self._add_checkpoint(there, at_s - behind * mean_s)

    def keep(self, at_s: float) -> None:
        """Add a checkpoint of the present progress, which is complete at this moment."""
        self._checkpoints.append((at_s, self.now))

    def fall_back(self, at_s: float) -> float:
        """Go back to the newest checkpoint that was complete at a moment; returns the lost seconds of training."""
        complete = [progress for moment, progress in self._checkpoints if moment <= at_s]
        lost, self.now = self.now.trained_s - complete[-1].trained_s, complete[-1]
        self._asked_after_step = min(self._asked_after_step, self.now.steps)
        self._checkpoints = [
            (moment, progress) for moment, progress in self._checkpoints if progress.steps <= self.now.steps
        ]
        return lost

    def reset_steady(self) -> None:
        """Note that the workers have changed."""
        self._steady = 0

    def ask(self, crew: Crew, seconds: float, generation: int, departures: int) -> list[Decision]:
        """Ask the policies after a step, and apply their decisions to batch, shards and learning rate."""
        view = self._view(crew, seconds, generation, departures)
        for policy in self._policies.policies:
            every = policy.observe_every
            if every and view.step // every > self._asked_after_step // every:
                self._policies.observed[policy.name] = observed(policy, view)
        self._asked_after_step = view.step
        view = replace(view, observed=dict(self._policies.observed))
        hooks: tuple[Hook, ...] = ("after_step",)
        if not self._policies.has_begun:
            self._policies.has_begun, hooks = True, ("before_train", "after_step")
        decisions = [decision for hook in hooks for decision in self._policies.ask(hook, view)]
        shape = self._policies.shape
        self._policies.take(decisions, view, loop=0)
        if self._policies.shape != shape:
            self._steady = 0
        self.stopped = any(decision.verb == "stop" for decision in decisions)
        return decisions

    def _add_checkpoint(self, progress: TrainingProgress, written_at: float) -> None:
        self._checkpoints.append((written_at + self._scenario.seconds.checkpoint_s, progress))
        del self._checkpoints[1:-8]  # old checkpoints are removed from the disk, too

    def _cut(self, crew: Crew) -> Crew:
        """The loads of a crew with the present number of shards, which a policy may have raised."""
        times = self._policies.shape.shards // self._work.shards
        return crew.finer(times) if times > 1 else crew

    def _busy(self, crew: Crew) -> Iterable[tuple[Load, float]]:
        """Each load of a crew, with the present number of shards, and its seconds of computing."""
        cut = self._cut(crew)
        return zip(cut.loads, self._clock.typical(cut, self._policies.shape), strict=True)

    def _view(self, crew: Crew, seconds: float, generation: int, departures: int) -> View:
        shape, durations = self._policies.shape, self._scenario.seconds
        timings = [
            Timings(
                shard_s=busy_s / load.shards,
                step_s=seconds,
                exposed_s=max(0.0, seconds - busy_s),
                formed_s=durations.forming(len(crew.places)),
                checkpoint_s=durations.checkpoint_s,
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
    """New policies, which have not been asked yet."""
    names = [name for name in scenario.job.policies if name != SPOT]
    named = policies_named(names, scenario.work.batch_size, "--policies or job.policies")
    if SPOT not in scenario.job.policies:
        return named
    return [SpotPolicy(market, budget=scenario.job.spot_budget, fewest=scenario.job.fewest), *named]


# The times of steps.


@dataclass(frozen=True, slots=True)
class Load:
    """The work of equal workers, whose speed is a multiple of that of the measured workers."""

    speed: float
    shards: int


@dataclass(frozen=True, slots=True)
class Crew:
    """The work of a generation's workers.

    Attributes:
        loads: the distinct loads.
        counts: the number of workers with each load.
        places: the place of each worker's load in ``loads``, by rank.
    """

    loads: tuple[Load, ...]
    counts: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, loads: Sequence[tuple[float, int]]) -> Crew:
        """Make a crew from the speed and the number of shards of each worker, by rank."""
        counts = Counter(loads)
        places = {load: place for place, load in enumerate(counts)}
        return cls(tuple(starmap(Load, counts)), tuple(counts.values()), tuple([places[load] for load in loads]))

    def finer(self, times: int) -> Crew:
        """The same crew with each shard cut into this number of shards."""
        return replace(self, loads=tuple(Load(load.speed, load.shards * times) for load in self.loads))


class StepClock:
    """Draws the seconds of steps.

    The slowest worker counts. Times are log-normal, and the largest of n equal workers is drawn directly, by the
    inverse of its distribution, Φ⁻¹(U^(1/n)). So the time to simulate a step does not depend on the number of workers.
    """

    def __init__(self, scenario: Scenario, chance: np.random.Generator) -> None:
        self._scenario, self._chance = scenario, chance
        self._cache: dict[tuple[Load, int, float], float] = {}

    def draw(self, crew: Crew, shape: BatchShape, steps: int) -> Array:
        """Draw the seconds of a number of steps."""
        groups = zip(crew.counts, crew.loads, self.typical(crew, shape), strict=True)
        times = [self._slowest(seconds, count, steps) for count, load, seconds in groups if load.shards]
        slowest: Array = np.maximum.reduce(times)
        return slowest

    def typical(self, crew: Crew, shape: BatchShape) -> list[float]:
        """The seconds of a step without jitter for each load of a crew; 0 for a load without shards."""
        samples, workers = shape.samples / shape.shards, len(crew.places)
        return [self._seconds(load, workers, samples) if load.shards else 0.0 for load in crew.loads]

    def _slowest(self, seconds: float, count: int, steps: int) -> Array:
        if not self._scenario.seconds.jitter:
            return np.full(steps, seconds)
        from scipy.special import ndtri  # takes a moment to load

        quantiles = ndtri(self._chance.random(steps) ** (1 / count))
        # The median of the jitter is 1, since the fit is to medians of whole steps of few workers.
        seconds_of_steps: Array = seconds * np.exp(self._scenario.seconds.jitter * quantiles)
        return seconds_of_steps

    def _seconds(self, load: Load, workers: int, samples: float) -> float:
        key = load, workers, samples
        if key not in self._cache:
            model, network = self._scenario.step, self._scenario.network
            if load.speed != 1.0:
                model = replace(model, a_c=model.a_c / load.speed, b_c=model.b_c / load.speed)
            if network is not None:
                model = replace(model, a_r=reduction_s(network, workers), b_r=0.0)
            # A layout in which each worker has this number of shards of this size.
            layout = Layout(workers, round(samples * workers * load.shards), workers * load.shards)
            self._cache[key] = model.seconds(layout)
        return self._cache[key]


def reduction_s(network: NamedNetwork, workers: int) -> float:
    """The seconds of a reduction, with all gradients in one bucket; 0 for one worker."""
    if workers <= BEYOND[-1]:
        return _forecast(network, workers)
    rows = [_terms(network.topology, number) for number in BEYOND]
    parts = np.linalg.solve(np.array(rows), np.array([_forecast(network, number) for number in BEYOND]))
    return max(float(np.dot(_terms(network.topology, workers), parts)), _forecast(network, BEYOND[-1]))


def _terms(topology: str, workers: int) -> tuple[float, float, float]:
    """The terms of a reduction's time: a constant, one for each round, and the share that a worker need not send."""
    return 1.0, math.log2(workers) if topology == "tree" else float(workers), 1 / workers


@cache
def _forecast(network: NamedNetwork, workers: int) -> float:
    if workers < 2:
        return 0.0
    pieces = workers if network.topology in ("direct", "ring") else PIECES
    graph = plan(Split.even(workers, workers), network.topology, pieces)
    return forecast(graph, network.gradient_bytes, network.latency_s, network.bytes_per_s).seconds
