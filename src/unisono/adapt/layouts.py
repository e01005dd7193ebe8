"""Layouts (a number of workers and a batch): those that were tried, and a model of the others' step time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.adapt.norms import Noise
from unisono.adapt.view import View
from unisono.received import short, value_of

# The quantities that decide the time of a step, as far as a policy changes them.


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """The number of workers and the batch with which a step is computed.

    ``cut`` is the number of shards into which each of the job's shards is split. One worker computes all of them.
    """

    workers: int
    batch_size: int
    shards: int
    cut: int = 1

    @property
    def job_shards(self) -> int:
        """The job's number of shards: the most workers that there can be."""
        return self.shards // self.cut

    @property
    def widest(self) -> int:
        """The number of shards of the worker that computes most, one after the other."""
        return -(-self.job_shards // self.workers) * self.cut

    @property
    def shard_size(self) -> float:
        """The number of samples in a shard."""
        return self.batch_size / self.shards


@lru_cache(1024)
def useful_sizes(shards: int, fewest: int, most: int) -> tuple[int, ...]:
    """The useful numbers of workers, smallest first: with one worker less the busiest one would have more shards.

    With 8 shards those are 1, 2, 3, 4 and 8: 5, 6 and 7 workers wait for the one with two shards, as 4 do.

    Args:
        shards: the job's number of shards.
        fewest: the smallest number of workers, which is always in the result, but at most the number of shards.
        most: the largest number of workers.
    """
    first = min(max(1, fewest), shards)
    return tuple(
        workers
        for workers in range(first, min(most, shards) + 1)
        if workers == first or -(-shards // workers) < -(-shards // (workers - 1))
    )


def layout_of(view: View) -> Layout:
    """The present layout."""
    return Layout(view.world_size, view.batch_size, view.shards, view.shards // view.base_shards)


# The tried layouts, and the time of their steps.

SETTLED = 3
"""The number of steps after a change from which on times count: the first ones allocate memory anew."""

WAIT_S, WAIT_STEPS = 120.0, 20
"""The seconds and steps of training, both of which must pass before a requested number of workers counts as refused."""

AGAIN_STEPS = 2000
"""The least number of steps for whose duration a time is valid: trying a layout again costs steps, too."""

_REQUEST = {"workers": int, "since_s": float, "since_step": int, "refused": tuple[tuple[int, int, float], ...]}
_STATE = {"wish": _REQUEST, "steps": tuple[float, ...], "figures": list[tuple[float, ...]], "noted": int}


@dataclass(frozen=True, slots=True)
class LayoutTrials:
    """The layouts that were tried one after the other, with their times.

    Attributes:
        workers: the number of workers that was requested and has not come yet; 0 for none.
        since_s: the seconds of training at which it was requested.
        since_step: the step after which it was requested.
        refused: each requested number that did not come, the number that there was, and the seconds of training then.
        steps: the newest steps in a row in one layout: the seconds of each on the slowest worker, oldest first.
        times: the newest time of a step in each layout, and the seconds of training at which it was noted.
        noted: the step after which the newest time was noted.
    """

    workers: int = 0
    since_s: float = 0.0
    since_step: int = 0
    refused: tuple[tuple[int, int, float], ...] = ()
    steps: tuple[float, ...] = ()
    times: Mapping[Layout, tuple[float, float]] = field(default_factory=dict)
    noted: int = -1

    @property
    def seconds(self) -> dict[Layout, float]:
        """The seconds of a step, by layout."""
        return {layout: step_s for layout, (step_s, _) in self.times.items()}

    def asking(self, workers: int, view: View) -> LayoutTrials:
        """The trials with a request for another number of workers."""
        return replace(self, workers=workers, since_s=view.seconds, since_step=view.step)

    def may_have(self, workers: int) -> bool:
        """Whether neither this number of workers was refused, nor one between it and the number that there was then."""
        return all(workers < number if number > had else workers > number for number, had, _ in self.refused)

    def after(self, view: View, patience: int, again_s: float) -> LayoutTrials:
        """The trials after one more step.

        ``patience`` is the number of steps whose median is a time, ``again_s`` the seconds of training for which a
        time, or a refusal, is valid.
        """
        is_settled = view.steady >= SETTLED and view.step_s > 0
        steps = (*self.steps, view.step_s)[-patience:] if is_settled else ()
        trials = replace(self._having_waited(view), steps=steps)
        if len(steps) < patience:
            return trials
        step_s = median(steps)  # an evaluation in between does not count
        oldest = view.seconds - max(again_s, AGAIN_STEPS * step_s)
        times = {layout: time for layout, time in self.times.items() if time[1] >= oldest}
        times |= {layout_of(view): (step_s, view.seconds)}
        refused = tuple(refusal for refusal in trials.refused if refusal[2] >= oldest)
        return replace(trials, refused=refused, steps=(), times=times, noted=view.step)

    def _having_waited(self, view: View) -> LayoutTrials:
        """The trials without their request, if the workers have come, or it has taken too long."""
        if not self.workers or self.workers == view.world_size:
            return replace(self, workers=0)
        if view.seconds > self.since_s + WAIT_S and view.step > self.since_step + WAIT_STEPS:
            others = tuple(refusal for refusal in self.refused if refusal[0] != self.workers)
            return replace(self, workers=0, refused=(*others, (self.workers, view.world_size, view.seconds)))
        return self

    def state(self) -> dict[str, Any]:
        """The state to keep: numbers, by name."""
        times = [[*astuple(layout), *time] for layout, time in self.times.items()]
        request = {name: getattr(self, name) for name in _REQUEST}
        return {"wish": request, "steps": list(self.steps), "figures": times, "noted": self.noted}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> LayoutTrials:
        """The inverse of :meth:`state`.

        Raises:
            Unreadable: it has other names, or values of other types.
            ValueError: a layout has no workers, samples or shards, or took no time.
        """
        values = value_of(_STATE, state, "trial")
        if any(not min(figure[:-1]) > 0 for figure in values["figures"]):
            raise ValueError(f"figures need numbers above 0, not {short(values['figures'])}")
        times = {Layout(*map(int, numbers)): (step_s, at_s) for *numbers, step_s, at_s in values["figures"]}
        return cls(**values["wish"], steps=values["steps"], times=times, noted=values["noted"])


# The goodput of a layout, and the way to a better one.

STEP = 2**0.5
"""The factor from one batch that may be tried to the next."""


def goodput(layout: Layout, step_s: float, noise: Noise, base: int) -> float:
    """Samples per second, each weighted by its progress relative to a sample of the batch that the job began with.

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
    """The limits on layouts. ``base`` and ``largest`` are samples in a batch, ``fewest`` and ``most`` are workers."""

    base: int
    largest: int
    fewest: int
    most: int

    def layouts(self, now: Layout, timed: Collection[Layout]) -> list[Layout]:
        """Return all possible goals: any batch, and up to double the largest number of workers that was timed.

        At least one layout was ``timed``.
        """
        batches = _batches(self.base, self.largest, now.shards)
        sizes = useful_sizes(now.job_shards, self.fewest, self.most)
        most = max(2 * max(layout.workers for layout in timed), sizes[0])
        numbers = [workers for workers in sizes if workers <= most]
        return [replace(now, workers=workers, batch_size=samples) for workers in numbers for samples in batches]

    def step_towards(self, goal: Layout, timed: Collection[Layout]) -> Layout:
        """Return the goal, or a layout on the way to it and next to one that was timed.

        Beyond those that were timed it goes by one step, first to the next number of workers, then to the next batch.
        """
        sizes = useful_sizes(goal.job_shards, self.fewest, self.most)
        workers = _next(goal.workers, sizes, {layout.workers for layout in timed})
        batches = _batches(self.base, self.largest, goal.shards)
        timed_batches = {round(layout.shard_size * goal.shards) for layout in timed}
        samples = _next(goal.batch_size, batches, timed_batches)
        if not min(layout.workers for layout in timed) <= workers <= max(layout.workers for layout in timed):
            samples = max(min(goal.batch_size, max(timed_batches)), min(timed_batches))
        return replace(goal, workers=workers, batch_size=samples)


def _batches(base: int, largest: int, shards: int) -> list[int]:
    """The batches that may be tried, smallest first; after the base, all shards of each are equally large."""
    sizes, samples = [base], float(base)
    while (samples := samples * STEP) < largest + shards:
        rounded = round(samples / shards) * shards
        if sizes[-1] < rounded <= largest:
            sizes.append(rounded)
    return sizes


def _next(goal: int, values: Sequence[int], timed: Collection[int]) -> int:
    """Return the value nearest to the goal, at most one beyond those that were timed."""
    lowest = max((value for value in values if value < min(timed)), default=values[0])
    highest = min((value for value in values if value > max(timed)), default=values[-1])
    return max(min(goal, highest), lowest)


# A model of the time of a step, for layouts that were not tried.

LARGEST_GAMMA = 10.0

STARTS = ({"a_r": 0.1, "gamma": 2.0}, {"a_r": 1.0, "gamma": 1.2}, {"a_r": 1.0, "gamma": 6.0})
"""The starting points of the search; times are relative to that of a typical shard."""

TRIES = 60
"""The most steps of each search; it ends after about ten, unless nothing fits."""

TINY = 1e-12

Numbers = Any
"""A number, or an array of them."""
PRIOR_WEIGHT = 0.01
"""The weight of a quantity's distance from its guess, beside that of a misfit: next to nothing."""


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
        """Return the seconds of a step."""
        return float(_seconds(self, layout.widest, layout.shard_size, layout.workers))


def _seconds(model: StepTime, shards: Numbers, samples: Numbers, workers: Numbers) -> Numbers:
    """The formula of :class:`StepTime`, for one layout or for many."""
    grad = model.a_c + model.b_c * samples
    sync = np.where(workers > 1, model.a_r + model.b_r * (workers - 2), 0.0)
    longer = np.maximum(np.maximum(grad, sync), TINY)
    together = longer * (1 + (np.minimum(grad, sync) / longer) ** model.gamma) ** (1 / model.gamma)
    result: Numbers = (shards - 1) * grad + together
    return result


def fit(timed: Mapping[Layout, float], computed: Mapping[Layout, float] | None = None) -> StepTime:
    """Return the step time that fits the measurements best: least squares of the logarithms, within the bounds.

    Costs that the times do not show are taken to be 0, as in Pollux (section 4.1), so that layouts get tried: as long
    as all shards had one size, larger ones cost nothing more; until two workers were timed, reducing costs nothing;
    until three were, further ones add nothing to it. The same times give the same bits on the same kind of processor.

    Args:
        timed: the seconds of a step, above 0, by layout; at least one.
        computed: the part of these seconds in which a worker computed its shards, for layouts where that is known: the
            rest is the time that remains when shards are spread over more workers.

    Raises:
        ValueError: there are no times.
    """
    if not timed:
        raise ValueError("a step time cannot be fitted to nothing")
    return _Fit(sorted(timed.items()), computed or {}).best()


class _Fit:
    """A search over numbers of about 1: all times are relative to that of a typical shard."""

    def __init__(self, timed: Sequence[tuple[Layout, float]], computed: Mapping[Layout, float]) -> None:
        layouts = [layout for layout, _ in timed]
        self._shards = np.array([float(layout.widest) for layout in layouts])
        self._samples = np.array([layout.shard_size for layout in layouts])
        self._workers = np.array([float(layout.workers) for layout in layouts])
        self._logs = np.log([seconds for _, seconds in timed])
        self._has_parts = np.array([layout.workers > 1 and layout in computed for layout in layouts])
        parts = [computed[layout] for layout, has in zip(layouts, self._has_parts, strict=True) if has]
        self._computed = np.log(np.array(parts, dtype=float))
        self._unit_s = float(np.exp(np.mean(self._logs - np.log(self._shards))))
        self._unit = float(np.exp(np.mean(np.log(self._samples))))
        most, sizes_differ = max(self._workers), len(set(self._samples)) > 1
        self._guess = {"a_c": 0.3, "b_c": 0.7} if sizes_differ else {"a_c": 1.0}
        self._guess |= {"a_r": 0.1, "gamma": 2.0} if most > 1 else {}
        # Times of a single number of workers do not show which part of the cost is b_r.
        several = len({layout.workers for layout in layouts if layout.workers > 1}) > 1
        self._guess |= {"b_r": 0.01} if most > 2 and (several or not self._has_parts.any()) else {}
        self._expected = np.array(list(self._guess.values()))

    def best(self) -> StepTime:
        """Return the best result from several starting points, since a search may end in a local minimum."""
        from scipy.optimize import least_squares  # takes a second to load, and few jobs need it

        lowest = [1.0 if name == "gamma" else 0.0 for name in self._guess]
        highest = [LARGEST_GAMMA if name == "gamma" else math.inf for name in self._guess]
        results = []
        for changes in STARTS if "a_r" in self._guess else ({},):
            start = list({**self._guess, **changes}.values())
            result = least_squares(self._misfits, start, bounds=(lowest, highest), max_nfev=TRIES)
            results.append((float(result.cost), [float(value) for value in result.x]))
        return self._model(min(results)[1])

    def _misfits(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        model = self._model(values)
        seconds = _seconds(model, self._shards, self._samples, self._workers)
        grad = np.maximum(self._shards * (model.a_c + model.b_c * self._samples), TINY)[self._has_parts]
        prior = PRIOR_WEIGHT * (values - self._expected)
        return np.concatenate([np.log(seconds) - self._logs, np.log(grad) - self._computed, prior])

    def _model(self, values: Sequence[float] | NDArray[np.float64]) -> StepTime:
        """The model with these values, in seconds; a quantity that is not searched for has no effect."""
        relative = {"b_c": 0.0, "a_r": 0.0, "b_r": 0.0, "gamma": 1.0}
        relative |= {name: float(value) for name, value in zip(self._guess, values, strict=True)}
        return StepTime(
            a_c=relative["a_c"] * self._unit_s,
            b_c=relative["b_c"] * self._unit_s / self._unit,
            a_r=relative["a_r"] * self._unit_s,
            b_r=relative["b_r"] * self._unit_s,
            gamma=relative["gamma"],
        )
