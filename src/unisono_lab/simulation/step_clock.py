"""How long steps take: the fitted model, a network that is named, slower hosts, and chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import starmap

import numpy as np
from numpy.typing import NDArray

from unisono.adapt.layout_trials import Layout
from unisono.adapt.view import BatchShape
from unisono.plan.forecast import forecast
from unisono.plan.split import Split
from unisono.plan.topology import plan
from unisono_lab.simulation.scenario import NamedNetwork, Scenario

Array = NDArray[np.float64]

BEYOND = (4, 8, 16)
"""Numbers of workers of which messages are looked at one by one; larger numbers go on as these do."""

PIECES = 4
"""Pieces of a bucket, where one comes back while the next is on its way there."""


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
