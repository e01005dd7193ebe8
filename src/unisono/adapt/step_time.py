"""A model of a step's time, for layouts that were never tried."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.adapt.layout_trials import Layout, useful_sizes
from unisono.adapt.norms import Noise

# How fast training comes forward in a layout, and the way to a better one.

STEP = 2**0.5
"""From one batch that may be tried to the next."""


def goodput(layout: Layout, step_s: float, noise: Noise, base: int) -> float:
    """Samples per second, each counted by what it brings beside one of the batch that the job began with.

    Qiao et al. (Pollux), OSDI 2021: B / T · (φ + B0) / (φ + B).

    Args:
        layout: the number of workers, and the batch B.
        step_s: T, seconds of a step.
        noise: the gradients' noise, with the noise scale φ.
        base: B0, samples in the batch that the job began with.
    """
    return layout.batch_size / step_s * noise.efficiency(base, layout.batch_size)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits on layouts.

    Attributes:
        base: samples in the smallest batch.
        largest: samples in the largest one.
        fewest: workers.
        most: workers.
    """

    base: int
    largest: int
    fewest: int
    most: int

    def layouts(self, now: Layout, seen: Collection[Layout]) -> list[Layout]:
        """All that may be aimed at: any batch, and up to double the workers that were seen, or the fewest.

        Args:
            now: the layout that training is in.
            seen: those that were timed; at least one.
        """
        batches = _batches(self.base, self.largest, now.shards)
        sizes = useful_sizes(now.job_shards, self.fewest, self.most)
        most = max(2 * max(one.workers for one in seen), sizes[0])
        wanted = [workers for workers in sizes if workers <= most]
        return [replace(now, workers=workers, batch_size=samples) for workers in wanted for samples in batches]

    def step_towards(self, goal: Layout, seen: Collection[Layout]) -> Layout:
        """The goal, or what is on the way to it and next to what was seen.

        Beyond what was seen it goes by one step, first to the next number of workers, then to the next batch.

        Args:
            goal: one of :meth:`layouts`.
            seen: those that were timed; at least one.
        """
        sizes = useful_sizes(goal.job_shards, self.fewest, self.most)
        workers = _next(goal.workers, sizes, {one.workers for one in seen})
        batches = _batches(self.base, self.largest, goal.shards)
        known = {round(one.shard_size * goal.shards) for one in seen}
        samples = _next(goal.batch_size, batches, known)
        if not min(one.workers for one in seen) <= workers <= max(one.workers for one in seen):
            samples = max(min(goal.batch_size, max(known)), min(known))
        return replace(goal, workers=workers, batch_size=samples)


def _batches(base: int, largest: int, shards: int) -> list[int]:
    """From the smallest on, such that all shards are equally large."""
    found, samples = [base], float(base)
    while (samples := samples * STEP) < largest + shards:
        rounded = round(samples / shards) * shards
        if found[-1] < rounded <= largest:
            found.append(rounded)
    return found


def _next(goal: int, values: Sequence[int], known: Collection[int]) -> int:
    """The one of the values that is nearest to the goal, and at most one beyond what is known."""
    lowest = max((value for value in values if value < min(known)), default=values[0])
    highest = min((value for value in values if value > max(known)), default=values[-1])
    return max(min(goal, highest), lowest)


# How long a step takes, in a layout that was never tried.

LARGEST_GAMMA = 10.0

BEGINNINGS = ({"a_r": 0.1, "gamma": 2.0}, {"a_r": 1.0, "gamma": 1.2}, {"a_r": 1.0, "gamma": 6.0})
"""Of the search; times are shares of a shard's."""

TRIES = 60
"""Of each search at most; it ends after about ten, unless nothing fits."""

TINY = 1e-12

Numbers = Any
"""A number, or an array of them."""
DOUBT = 0.01
"""How much a wrong guess of what the figures leave open costs, beside a misfit of a figure: next to nothing."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The step time of Pollux (Qiao et al., OSDI 2021, section 3.2).

    A worker computes its shards one after the other, and the last one overlaps with the reduction::

        T      = (n - 1) T_grad + (T_grad^g + T_sync^g)^(1/g)
        T_grad = a_c + b_c m
        T_sync = a_r + b_r (W - 2), and 0 for one worker

    with W workers, n shards on the busiest of them and m samples in a shard. g is 1 if nothing overlaps, and large if
    the longer of both hides the shorter.

    Attributes:
        a_c: seconds of a shard without samples.
        b_c: seconds that each sample of it adds.
        a_r: seconds of a reduction between two workers.
        b_r: seconds that each further worker adds.
        gamma: g, 1 … 10.
    """

    a_c: float
    b_c: float
    a_r: float
    b_r: float
    gamma: float

    def seconds(self, layout: Layout) -> float:
        """Of a step."""
        return float(_seconds(self, layout.widest, layout.shard_size, layout.workers))


def _seconds(model: StepTime, shards: Numbers, samples: Numbers, workers: Numbers) -> Numbers:
    """The formula, for one layout or for many."""
    grad = model.a_c + model.b_c * samples
    sync = np.where(workers > 1, model.a_r + model.b_r * (workers - 2), 0.0)
    longer = np.maximum(np.maximum(grad, sync), TINY)
    together = longer * (1 + (np.minimum(grad, sync) / longer) ** model.gamma) ** (1 / model.gamma)
    found: Numbers = (shards - 1) * grad + together
    return found


def fit(seen: Mapping[Layout, float], computed: Mapping[Layout, float] | None = None) -> StepTime:
    """The step time that explains best what was seen: least squares of the logarithms, within the bounds.

    What the figures cannot tell is taken for granted, as in Pollux (section 4.1), so that it gets tried: as long as all
    shards had one size, larger ones cost nothing more; until two workers were seen, reducing costs nothing; until three
    were, further ones add nothing to it. The same figures give the same bits on the same kind of processor.

    Args:
        seen: seconds of a step, above 0, by layout; at least one.
        computed: the part of these in which a worker computed its shards, as far as it is known: the rest is
            what remains of a step when shards are spread over more workers.

    Raises:
        ValueError: there is none.
    """
    if not seen:
        raise ValueError("a step time cannot be fitted to nothing")
    return _Fit(sorted(seen.items()), computed or {}).best()


class _Fit:
    """A search in numbers of about 1: all times are shares of a typical shard's."""

    def __init__(self, seen: Sequence[tuple[Layout, float]], computed: Mapping[Layout, float]) -> None:
        layouts = [layout for layout, _ in seen]
        self._shards = np.array([float(layout.widest) for layout in layouts])
        self._samples = np.array([layout.shard_size for layout in layouts])
        self._workers = np.array([float(layout.workers) for layout in layouts])
        self._logs = np.log([seconds for _, seconds in seen])
        self._has_parts = np.array([layout.workers > 1 and layout in computed for layout in layouts])
        parts = [computed[layout] for layout, has in zip(layouts, self._has_parts, strict=True) if has]
        self._computed = np.log(np.array(parts, dtype=float))
        self._unit_s = float(np.exp(np.mean(self._logs - np.log(self._shards))))
        self._unit = float(np.exp(np.mean(np.log(self._samples))))
        most, sizes_differ = max(self._workers), len(set(self._samples)) > 1
        self._guess = {"a_c": 0.3, "b_c": 0.7} if sizes_differ else {"a_c": 1.0}
        self._guess |= {"a_r": 0.1, "gamma": 2.0} if most > 1 else {}
        # Of a single number of workers, what two cost and what further ones add cannot be told apart.
        several = len({layout.workers for layout in layouts if layout.workers > 1}) > 1
        self._guess |= {"b_r": 0.01} if most > 2 and (several or not self._has_parts.any()) else {}
        self._expected = np.array(list(self._guess.values()))

    def best(self) -> StepTime:
        """Of several beginnings, since the search may end in a valley that is not the deepest."""
        from scipy.optimize import least_squares  # takes a second to load, and few jobs need it

        lowest = [1.0 if name == "gamma" else 0.0 for name in self._guess]
        highest = [LARGEST_GAMMA if name == "gamma" else math.inf for name in self._guess]
        found = []
        for beginning in BEGINNINGS if "a_r" in self._guess else ({},):
            start = list({**self._guess, **beginning}.values())
            ends = least_squares(self._misfits, start, bounds=(lowest, highest), max_nfev=TRIES)
            found.append((float(ends.cost), [float(value) for value in ends.x]))
        return self._model(min(found)[1])

    def _misfits(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        model = self._model(values)
        seconds = _seconds(model, self._shards, self._samples, self._workers)
        grad = np.maximum(self._shards * (model.a_c + model.b_c * self._samples), TINY)[self._has_parts]
        doubts = DOUBT * (values - self._expected)
        return np.concatenate([np.log(seconds) - self._logs, np.log(grad) - self._computed, doubts])

    def _model(self, values: Sequence[float] | NDArray[np.float64]) -> StepTime:
        """What is not known has no effect."""
        found = {"b_c": 0.0, "a_r": 0.0, "b_r": 0.0, "gamma": 1.0}
        found |= {name: float(value) for name, value in zip(self._guess, values, strict=True)}
        return StepTime(
            a_c=found["a_c"] * self._unit_s,
            b_c=found["b_c"] * self._unit_s / self._unit,
            a_r=found["a_r"] * self._unit_s,
            b_r=found["b_r"] * self._unit_s,
            gamma=found["gamma"],
        )
