"""The analysis of a study's figures: statistics, models and advice, which reports show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from unisono.adapt.layouts import Layout, StepTime, fit
from unisono_lab.study.estimate import AMDAHL, GUSTAFSON, USL, Estimate, Fit, fitted, median, ratio
from unisono_lab.study.results import BatchCurve, Cell, Mode, Results

# The summary of repeated runs: a row for each number of workers, with intervals.


T = TypeVar("T")

PARTS: Mapping[str, str] = {
    "data_s": "data",
    "compute_s": "compute",
    "exposed_s": "exposed communication",
    "wait_s": "waiting for the slowest",
    "update_s": "update",
}
"""The parts of a step: the name of each by its field."""

MODES: tuple[Mode, ...] = ("strong", "weak", "baseline")


@dataclass(frozen=True, slots=True)
class Row:
    """A number of workers, of one label and one mode.

    All ratios are of medians. Speedup is T(1)/T(W) for the same samples, which is the ratio of the throughputs; in weak
    scaling it is the scaled speedup.

    Attributes:
        label: the name of the measured model, machine or version.
        cells: the measurements that count.
        rates: samples per second of each run, or of each epoch where there is but one run.
        repeats: the numbers of the runs; none if these are epochs.
        samples_per_s: the throughput, in samples per second.
        epoch_s: seconds of an epoch.
        speedup: the speedup over one worker; None if that was not measured, or if workers shared cores.
        over_baseline: the throughput as a multiple of that of the plain loop with one worker's threads; None as above.
        over_equal: the throughput as a multiple of that of the plain loop with as many threads as all workers have
            together.
    """

    label: str
    mode: Mode
    workers: int
    cells: Sequence[Cell]
    rates: Sequence[float]
    repeats: Sequence[int]
    samples_per_s: Estimate
    epoch_s: Estimate | None
    speedup: Estimate | None = None
    over_baseline: Estimate | None = None
    over_equal: Estimate | None = None

    @property
    def oversubscribed(self) -> bool:
        """Whether workers shared cores, so that the figures do not show scaling."""
        return any(cell.oversubscribed for cell in self.cells)

    @property
    def efficiency(self) -> Estimate | None:
        """Speedup per worker."""
        return None if self.speedup is None else self.speedup.mapped(lambda speedup: speedup / self.workers)

    @property
    def serial_share(self) -> Estimate | None:
        """The share of the work that behaves as if serial: (1/S - 1/W) / (1 - 1/W) (Karp and Flatt, CACM 1990)."""
        if self.speedup is None or self.workers == 1:
            return None
        share = 1 / self.workers
        return self.speedup.mapped(lambda speedup: (1 / speedup - share) / (1 - share))

    @property
    def batch_size(self) -> int | None:
        """Samples in a global batch, if all runs had the same."""
        return _only({cell.batch_size for cell in self.cells})

    @property
    def learning_rate(self) -> float | None:
        """The learning rate, if all runs had the same."""
        return _only({cell.learning_rate for cell in self.cells})

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step."""
        seconds = self._median_of("step_s")
        if seconds is None and self.batch_size:
            return self.batch_size / self.samples_per_s.value
        return seconds

    @property
    def peak_memory_mib(self) -> float | None:
        """The most memory that a worker needed, in MiB."""
        return max((cell.peak_memory_mib for cell in self.cells if cell.peak_memory_mib is not None), default=None)

    @property
    def loss(self) -> float | None:
        """Median loss after the same samples."""
        return self._median_of("loss")

    @property
    def accuracy(self) -> float | None:
        """Median accuracy after the same samples."""
        return self._median_of("accuracy")

    @property
    def digests(self) -> set[str]:
        """The digests of the weights; one if all runs ended with the same bits."""
        return {cell.digest for cell in self.cells if cell.digest}

    @property
    def parts(self) -> dict[str, float] | None:
        """Median seconds of each part of a step; None unless data, compute or communication was measured."""
        seconds = {field: value for field in PARTS if (value := self._median_of(field)) is not None}
        return seconds or None

    def _median_of(self, field: str) -> float | None:
        values = [value for cell in self.cells if (value := getattr(cell, field)) is not None]
        return statistics.median(values) if values else None


Rows = dict[tuple[Mode, str], list[Row]]
"""The rows of each mode and label, fewest workers first; strong scaling comes first, and plain loops last."""


def summarized(results: Results) -> Rows:
    """Median, interval, speedup and efficiency of all measurements.

    The first epoch of a run is left out if the run has later ones. The bootstrap draws from the repeated runs, or from
    the epochs if there is one run.
    """
    succeeded = [cell for cell in results.cells if cell.succeeded]
    later = {_run(cell) for cell in succeeded if cell.epoch is not None and cell.epoch > 1}
    groups: dict[tuple[Mode, str], dict[int, list[Cell]]] = {}
    for cell in sorted(succeeded, key=lambda cell: MODES.index(cell.mode)):
        if cell.epoch != 1 or _run(cell) not in later:
            groups.setdefault((cell.mode, cell.label), {}).setdefault(cell.workers, []).append(cell)
    curves = {
        (mode, label): [
            _row(cells, results.figure("epoch_samples", label) or None) for _, cells in sorted(by_workers.items())
        ]
        for (mode, label), by_workers in groups.items()
    }
    return {
        key: rows if key[0] == "baseline" else _related(rows, plain_loops(curves, key[1]))
        for key, rows in curves.items()
    }


def plain_loops(rows: Rows, label: str) -> list[Row]:
    """The plain loops to compare with: those with this label, or else those without a label."""
    return rows.get(("baseline", label)) or rows.get(("baseline", "")) or []


def _run(cell: Cell) -> tuple[str, Mode, int, int]:
    return cell.label, cell.mode, cell.workers, cell.repeat


def _row(cells: Sequence[Cell], epoch_samples: float | None) -> Row:
    runs: dict[int, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(cell.repeat, []).append(cell)
    is_repeated = len(runs) > 1
    units = list(runs.values()) if is_repeated else [[cell] for cell in cells]
    rates = [statistics.median(cell.samples_per_s for cell in unit) for unit in units]
    epochs = [_epoch_s(unit, rate, epoch_samples) for unit, rate in zip(units, rates, strict=True)]
    known_epochs = [seconds for seconds in epochs if seconds is not None]
    return Row(
        label=cells[0].label,
        mode=cells[0].mode,
        workers=cells[0].workers,
        cells=cells,
        rates=rates,
        repeats=list(runs) if is_repeated else [],
        samples_per_s=median(rates),
        epoch_s=median(known_epochs) if known_epochs else None,
    )


def _epoch_s(unit: Sequence[Cell], rate: float, epoch_samples: float | None) -> float | None:
    """Seconds of an epoch of one run: measured, or else from its throughput."""
    measured = [cell.epoch_s for cell in unit if cell.epoch_s is not None]
    if measured:
        return statistics.median(measured)
    return None if epoch_samples is None else epoch_samples / rate


def _related(curve: Sequence[Row], plain: Sequence[Row]) -> list[Row]:
    """The rows with their ratios to one worker and to the plain loops."""
    alone = _with_workers(curve, 1)
    return [
        row
        if row.oversubscribed
        else replace(
            row,
            speedup=_times(row, alone),
            over_baseline=_times(row, _with_workers(plain, 1)),
            over_equal=_times(row, _with_workers(plain, row.workers)),
        )
        for row in curve
    ]


def _with_workers(rows: Sequence[Row], workers: int) -> Row | None:
    return next((row for row in rows if row.workers == workers), None)


def _times(row: Row, reference: Row | None) -> Estimate | None:
    if reference is None or reference.oversubscribed:
        return None
    if row is reference:
        return Estimate(1.0)
    paired = bool(row.repeats) and sorted(row.repeats) == sorted(reference.repeats)
    return ratio(_in_order(row), _in_order(reference), paired=paired)


def _in_order(row: Row) -> list[float]:
    """The rates of a row, ordered by the number of the repeat."""
    if not row.repeats:
        return list(row.rates)
    return [rate for _, rate in sorted(zip(row.repeats, row.rates, strict=True))]


def _only(values: set[T | None]) -> T | None:
    return next(iter(values)) if len(values) == 1 else None


# The recommended number of workers.

HOUR_S = 3600.0

EFFICIENT = 0.8
"""The default of the efficiency that the recommended number of workers must have."""


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
        """The cost of an epoch by number of workers; of a million samples if the epoch of a row is not known."""
        seconds = [row.epoch_s.value for row in curve if row.epoch_s]
        if len(seconds) < len(curve):
            seconds = [1e6 / row.samples_per_s.value for row in curve]
        hours = {row.workers: time_s / HOUR_S for row, time_s in zip(curve, seconds, strict=True)}
        return {workers: (self.waiting + self.worker * workers) * time_h for workers, time_h in hours.items()}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Numbers of workers among those that were measured.

    Attributes:
        fastest: the smallest number of workers that is not slower than any other, beyond the noise.
        efficient: the largest number of workers with the required efficiency; None if none has it.
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
    """The recommendation from the rows of one curve, at least one, none of which shared its cores."""
    best = max(curve, key=lambda row: row.samples_per_s.value)
    fastest = min((row for row in curve if not _slower(row, best)), key=lambda row: row.workers)
    efficient = [row for row in curve if row.efficiency is not None and row.efficiency.value >= threshold]
    costs = {} if prices is None else prices.costs(curve)
    return Recommendation(
        fastest=fastest,
        efficient=max(efficient, key=lambda row: row.workers, default=None),
        cheapest=min(curve, key=lambda row: (costs[row.workers], row.workers)) if costs else None,
        costs=costs,
        of_epochs=all(row.epoch_s for row in curve),
    )


def _slower(row: Row, best: Row) -> bool:
    """Whether the whole interval of a row is below that of the best; a figure without interval counts as a point."""
    own, others = row.samples_per_s, best.samples_per_s
    return (own.value if own.high is None else own.high) < (others.value if others.low is None else others.low)


# The time of a step, computed from the measured times of its parts.


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
        rest_s: seconds of the update and of waiting for data, which more workers do not shorten.
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
        """Seconds of a step, if computing and communicating overlap as far as they can, or not at all."""
        compute = self.compute_s if mode == "weak" else self.compute_s / workers
        communication = self.communication_s(workers)
        return self.rest_s + (max(compute, communication) if overlapped else compute + communication)

    def speedup(self, workers: int, mode: Mode, *, overlapped: bool) -> float:
        """The speedup over one worker."""
        times = workers if mode == "weak" else 1
        return times * (self.compute_s + self.rest_s) / self.step_s(workers, mode, overlapped=overlapped)


def step_model(results: Results, curve: Sequence[Row]) -> StepModel | None:
    """The model from one worker's row, the setting ``gradient_bytes``, and the environment's ``bandwidth_bytes_per_s``.

    It is None if one of these is not known; a missing ``latency_s`` is 0.
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
    step_times = {
        Layout(row.workers, row.batch_size, shards): row.step_s
        for row in curve
        if not row.oversubscribed and row.batch_size and row.step_s and row.workers <= shards
    }
    return fit(step_times) if len(step_times) > 1 else None


LAWS = {"strong": (AMDAHL, USL), "weak": (GUSTAFSON, USL)}
"""The laws to fit in each mode: Amdahl's keeps the work, Gustafson's lets it grow with the workers."""


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """The settings of the report of a study.

    Attributes:
        predict: numbers of workers to predict; empty for twice and four times the largest measured number.
        threshold: the required efficiency, 0 … 1.
    """

    title: str = "Scaling study"
    predict: Sequence[int] = ()
    threshold: float = EFFICIENT
    prices: Prices | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """The rows of one label in one mode.

    Attributes:
        rows: all numbers of workers, fewest first.
        plain: the plain loops, with the threads of one worker or of more; none if they were not measured.
        fits: the fits of those laws for which there are enough figures.
        model: the model of a step, from its parts; None if they were not measured.
        step_time: the model of a step's time that policies fit; None if steps were not measured.
        advice: the recommendation; None if fewer than two rows show scaling.
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
        """The rows whose workers did not share cores."""
        return [row for row in self.rows if not row.oversubscribed]

    @property
    def crowded(self) -> list[Row]:
        """The rows whose workers shared cores."""
        return [row for row in self.rows if row.oversubscribed]

    @property
    def alone(self) -> Row | None:
        """The row of one worker; None if it was not measured, or shared its cores."""
        return self.usable[0] if self.usable and self.usable[0].workers == 1 else None

    @property
    def best_fit(self) -> Fit | None:
        """The fit to predict with: the one of the lowest BIC, of those that have fewer unknowns than figures."""
        candidates = [fit for fit in self.fits if fit.covariance is not None] or self.fits[:1]
        return min(candidates, key=lambda fit: fit.bic, default=None)


@dataclass(frozen=True, slots=True)
class Analysis:
    """A study and what follows from it.

    Attributes:
        curves: the curves, strong ones first.
    """

    results: Results
    settings: ReportSettings
    curves: Sequence[Curve]
    batches: Mapping[str, BatchCurve] = field(default_factory=dict)

    @property
    def modes(self) -> list[Mode]:
        """The measured modes."""
        return list(dict.fromkeys(curve.mode for curve in self.curves))

    def of(self, mode: Mode) -> list[Curve]:
        """The curves of a mode."""
        return [curve for curve in self.curves if curve.mode == mode]


def analyzed(results: Results, settings: ReportSettings, batches: Mapping[str, BatchCurve] | None = None) -> Analysis:
    """Analyse results: summarize the runs, fit the laws, and recommend numbers of workers."""
    rows_by_curve = summarized(results)
    curves = [
        _curve(results, settings, rows, plain_loops(rows_by_curve, label))
        for (mode, label), rows in rows_by_curve.items()
        if mode != "baseline"
    ]
    return Analysis(results, settings, curves, batches or {})


def _curve(results: Results, settings: ReportSettings, rows: Sequence[Row], plain: Sequence[Row]) -> Curve:
    usable = [row for row in rows if not row.oversubscribed]
    measured = {row.workers: row.rates for row in usable}
    largest = max(measured, default=1)
    return Curve(
        mode=rows[0].mode,
        label=rows[0].label,
        rows=rows,
        plain=plain,
        fits=[fit for law in LAWS[rows[0].mode] if (fit := fitted(law, measured)) is not None],
        model=step_model(results, usable) if usable else None,
        step_time=fitted_step_time(results, usable),
        predict=[number for number in settings.predict or (2 * largest, 4 * largest) if number not in measured],
        advice=recommended(usable, settings.threshold, settings.prices) if len(usable) > 1 else None,
    )
