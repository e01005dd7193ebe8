"""How long steps take: the fitted model, slower hosts, and chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import starmap

import numpy as np
from numpy.typing import NDArray

from unisono.adapt.layout_trials import Layout
from unisono.adapt.step_time import StepTime
from unisono_lab.simulation.network import NamedNetwork

Array = NDArray[np.float64]


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
        model: the time of a step on workers of speed 1.
        jitter: the standard deviation of the logarithm of a worker's time.
        chance: the source of chance.
        network: the network by which reductions are forecast; None if they are as the model has them.
    """

    def __init__(
        self, model: StepTime, jitter: float, chance: np.random.Generator, network: NamedNetwork | None = None
    ) -> None:
        self._model, self._jitter, self._chance, self._network = model, jitter, chance, network
        self._known: dict[tuple[Load, int, float], float] = {}

    def draw(self, crew: Crew, batch_size: int, shards: int, steps: int) -> Array:
        """Seconds of each of so many steps.

        Args:
            crew: what the workers have to compute.
            batch_size: samples in a global batch.
            shards: the number of shards of it.
            steps: the number of steps.
        """
        samples, groups = batch_size / shards, zip(crew.loads, crew.counts, strict=True)
        times = [self._of(load, count, len(crew.places), samples, steps) for load, count in groups if load.shards]
        found: Array = np.maximum.reduce(times)
        return found

    def typical(self, crew: Crew, batch_size: int, shards: int) -> list[float]:
        """Seconds of a step without chance, of each load of a crew; 0 of one without shards."""
        samples, workers = batch_size / shards, len(crew.places)
        return [self._seconds(load, workers, samples) if load.shards else 0.0 for load in crew.loads]

    def _of(self, load: Load, count: int, workers: int, samples: float, steps: int) -> Array:
        seconds = self._seconds(load, workers, samples)
        if not self._jitter:
            return np.full(steps, seconds)
        from scipy.special import ndtri  # takes a moment to load

        slowest = ndtri(self._chance.random(steps) ** (1 / count))
        # The median of the jitter is 1: what was fitted are medians of whole steps of few workers.
        found: Array = seconds * np.exp(self._jitter * slowest)
        return found

    def _seconds(self, load: Load, workers: int, samples: float) -> float:
        key = load, workers, samples
        if key not in self._known:
            self._known[key] = self._by_model(load, workers, samples)
        return self._known[key]

    def _by_model(self, load: Load, workers: int, samples: float) -> float:
        model = self._model
        if load.speed != 1.0:
            model = StepTime(model.a_c / load.speed, model.b_c / load.speed, model.a_r, model.b_r, model.gamma)
        if self._network is not None:
            model = replace(model, a_r=self._network.reduction_s(workers), b_r=0.0)
        # A layout in which the widest worker has this many shards of this size.
        return model.seconds(Layout(workers, round(samples * workers * load.shards), workers * load.shards))
