"""All that follows from a study's figures, before it is put into words and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.adapt.layout_trials import Layout
from unisono.adapt.step_time import StepTime, fit
from unisono_lab.analysis.batch_curve import BatchCurve
from unisono_lab.analysis.laws import AMDAHL, GUSTAFSON, USL, Fit, fitted
from unisono_lab.analysis.results import Mode, Results
from unisono_lab.analysis.summary import Row, Summary, summarized

# The recommended number of workers.

HOUR_S = 3600.0

EFFICIENT = 0.8
"""The efficiency that is asked for unless somebody says otherwise."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of time, in any one currency.

    An hour of training on W workers costs ``waiting + worker · W``, as it does for
    :class:`~unisono.adapt.layout_policies.ScalingPolicy`, whose ``waiting`` is 1.

    Attributes:
        worker: the price of an hour of one worker.
        waiting: the value of ending the training an hour earlier.
    """

    worker: float
    waiting: float = 0.0

    def costs(self, curve: Sequence[Row]) -> dict[int, float]:
        """Of an epoch, by workers; of a million samples where the epoch is not known of all."""
        seconds = [row.epoch_s.value for row in curve if row.epoch_s]
        if len(seconds) < len(curve):
            seconds = [1e6 / row.samples_per_s.value for row in curve]
        hours = {row.workers: each / HOUR_S for row, each in zip(curve, seconds, strict=True)}
        return {workers: (self.waiting + self.worker * workers) * each for workers, each in hours.items()}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Numbers of workers among those that were measured.

    Attributes:
        fastest: the smallest number of workers that is not slower than any other, beyond the noise.
        efficient: the largest number of workers with the efficiency that was asked for; None if none has it.
        cheapest: the number of workers with the lowest cost; None without prices.
        costs: the cost of an epoch or of a million samples, by number of workers; empty without prices.
        of_epochs: whether costs are those of an epoch.
    """

    fastest: Row
    efficient: Row | None
    cheapest: Row | None
    costs: Mapping[int, float]
    of_epochs: bool


def recommended(curve: Sequence[Row], threshold: float = EFFICIENT, prices: Prices | None = None) -> Recommendation:
    """The recommendation from the rows of one curve.

    Args:
        curve: the rows, at least one, none of which shared its cores.
        threshold: the efficiency asked for, 0 … 1.
        prices: the prices; None to leave costs out.
    """
    best = max(curve, key=lambda row: row.samples_per_s.value)
    fastest = min((row for row in curve if not _slower(row, best)), key=lambda row: row.workers)
    good = [row for row in curve if row.efficiency is not None and row.efficiency.value >= threshold]
    costs = {} if prices is None else prices.costs(curve)
    return Recommendation(
        fastest=fastest,
        efficient=max(good, key=lambda row: row.workers, default=None),
        cheapest=min(curve, key=lambda row: (costs[row.workers], row.workers)) if costs else None,
        costs=costs,
        of_epochs=all(row.epoch_s for row in curve),
    )


def _slower(row: Row, best: Row) -> bool:
    """Whether the two intervals do not meet; figures without intervals count as they are."""
    one, other = row.samples_per_s, best.samples_per_s
    return (one.value if one.high is None else one.high) < (other.value if other.low is None else other.low)


# How long a step takes, from what its parts were measured to take.


@dataclass(frozen=True, slots=True)
class StepModel:
    """A step of W workers, from one worker's step and from the network.

    ::

        compute(W)       = compute / W            in strong scaling; compute in weak scaling
        communication(W) = 2 ⌈log2 W⌉ latency + 2 (W - 1)/W · bytes / bandwidth
        step(W)          = rest + compute(W) + communication(W)         if nothing overlaps
        step(W)          = rest + max(compute(W), communication(W))     if all does

    The communication is that of an all-reduce by halves (Rabenseifner; Thakur, Rabenseifner and Gropp, IJHPCA 2005).
    Nothing in it is fitted.

    Attributes:
        compute_s: seconds of forward and backward on one worker.
        rest_s: seconds of what each worker does for itself: the update, and waiting for data.
        gradient_bytes: the bytes of gradients that are reduced in a step.
        latency_s: seconds of a message between two workers.
        bandwidth: bytes per second between two workers.
    """

    compute_s: float
    rest_s: float
    gradient_bytes: float
    latency_s: float
    bandwidth: float

    def communication_s(self, workers: int) -> float:
        """Seconds of an all-reduce."""
        if workers == 1:
            return 0.0
        turns = 2 * math.ceil(math.log2(workers))
        return turns * self.latency_s + 2 * (workers - 1) / workers * self.gradient_bytes / self.bandwidth

    def step_s(self, workers: int, mode: Mode, *, overlapped: bool) -> float:
        """Seconds of a step, if all of the shorter of computing and communicating is hidden, or none."""
        compute = self.compute_s if mode == "weak" else self.compute_s / workers
        communication = self.communication_s(workers)
        return self.rest_s + (max(compute, communication) if overlapped else compute + communication)

    def speedup(self, workers: int, mode: Mode, *, overlapped: bool) -> float:
        """Against one worker."""
        times = workers if mode == "weak" else 1
        return times * (self.compute_s + self.rest_s) / self.step_s(workers, mode, overlapped=overlapped)


def step_model(results: Results, curve: Sequence[Row]) -> StepModel | None:
    """From one worker's row, the setting ``gradient_bytes``, and the environment's ``bandwidth_bytes_per_s``.

    Returns:
        None if one of them is not known. The environment's ``latency_s`` counts as 0 if it is not there.
    """
    label = curve[0].label
    alone = next((row for row in curve if row.workers == 1), None)
    parts = alone.parts if alone else None
    size, bandwidth = results.figure("gradient_bytes", label), results.figure("bandwidth_bytes_per_s", label)
    if not parts or "compute_s" not in parts or not size or not bandwidth or min(size, bandwidth) < 0:
        return None
    rest = parts.get("update_s", 0.0) + parts.get("data_s", 0.0)
    return StepModel(parts["compute_s"], rest, size, results.figure("latency_s", label) or 0.0, bandwidth)


def fitted_step_time(results: Results, curve: Sequence[Row]) -> StepTime | None:
    """The step time of Pollux, as policies use it; None unless steps, batches and the setting ``shards`` are known."""
    shards = int(results.figure("shards", curve[0].label) or 0) if curve else 0
    seen = {
        Layout(row.workers, row.batch_size, shards): row.step_s
        for row in curve
        if not row.oversubscribed and row.batch_size and row.step_s and row.workers <= shards
    }
    return fit(seen) if len(seen) > 1 else None


LAWS = {"strong": (AMDAHL, USL), "weak": (GUSTAFSON, USL)}
"""Amdahl's keeps the work, Gustafson's lets it grow with the workers."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The reader's choices for the report of a study.

    Attributes:
        title: the report's title.
        predict: numbers of workers to predict; empty for twice and four times as many as were measured.
        threshold: the efficiency that workers have to reach, 0 … 1.
        prices: None to leave costs out.
    """

    title: str = "Scaling study"
    predict: Sequence[int] = ()
    threshold: float = EFFICIENT
    prices: Prices | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """The rows of one label in one mode.

    Attributes:
        mode: strong or weak.
        label: the name of what was measured.
        rows: all numbers of workers, fewest first.
        plain: the plain loops, with the threads of one worker or of more; none if they were not measured.
        fits: the fits of those laws for which there are enough figures.
        model: the model of a step, from its parts; None if they were not measured.
        step_time: the model of a step's time that policies fit; None if steps were not measured.
        predict: numbers of workers to predict.
        advice: None if no number of workers can be advised.
    """

    mode: Mode
    label: str
    rows: Sequence[Row]
    plain: Sequence[Row]
    fits: Sequence[Fit]
    model: StepModel | None
    step_time: StepTime | None
    predict: Sequence[int]
    advice: Recommendation | None

    @property
    def usable(self) -> list[Row]:
        """The rows that say something about scaling."""
        return [row for row in self.rows if not row.oversubscribed]

    @property
    def crowded(self) -> list[Row]:
        """The rows whose workers shared cores."""
        return [row for row in self.rows if row.oversubscribed]

    @property
    def alone(self) -> Row | None:
        """The row of one worker, if it says something about scaling."""
        return self.usable[0] if self.usable and self.usable[0].workers == 1 else None

    @property
    def best_fit(self) -> Fit | None:
        """The one to predict with: the better explanation, of those that have fewer unknowns than there are figures."""
        known = [fit for fit in self.fits if fit.covariance is not None] or self.fits[:1]
        return min(known, key=lambda fit: fit.bic, default=None)


@dataclass(frozen=True, slots=True)
class Analysis:
    """A study and what follows from it.

    Attributes:
        results: the measurements.
        wanted: the reader's choices.
        curves: the curves, strong ones first.
        batches: the results of the batch size search, by label.
    """

    results: Results
    wanted: Wanted
    curves: Sequence[Curve]
    batches: Mapping[str, BatchCurve] = field(default_factory=dict)

    @property
    def modes(self) -> list[Mode]:
        """That were measured."""
        return list(dict.fromkeys(curve.mode for curve in self.curves))

    def of(self, mode: Mode) -> list[Curve]:
        """The curves of a mode."""
        return [curve for curve in self.curves if curve.mode == mode]


def analyzed(results: Results, wanted: Wanted, batches: Mapping[str, BatchCurve] | None = None) -> Analysis:
    """Summarize, fit, and advise."""
    summary = summarized(results)
    curves = [_curve(results, wanted, summary, mode, label, rows) for mode, label, rows in summary.curves()]
    return Analysis(results, wanted, curves, batches or {})


def _curve(results: Results, wanted: Wanted, summary: Summary, mode: Mode, label: str, rows: Sequence[Row]) -> Curve:
    usable = [row for row in rows if not row.oversubscribed]
    measured = {row.workers: row.rates for row in usable}
    fits = [fit for law in LAWS[mode] if (fit := fitted(law, measured)) is not None]
    most = max(measured, default=1)
    return Curve(
        mode=mode,
        label=label,
        rows=rows,
        plain=summary.plain(label),
        fits=fits,
        model=step_model(results, usable) if usable else None,
        step_time=fitted_step_time(results, usable),
        predict=[number for number in wanted.predict or (2 * most, 4 * most) if number not in measured],
        advice=recommended(usable, wanted.threshold, wanted.prices) if len(usable) > 1 else None,
    )
