"""Laws of scaling, fitted to what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unisono_lab.analysis.estimate import COVERED, Estimate

Array = NDArray[np.float64]
Formula = Callable[[Array, Array], Array]

SMALLEST = 1e-9
"""Of a speedup that a law may give while it is fitted."""


@dataclass(frozen=True, slots=True)
class Law:
    """Speedup as a function of the number of workers.

    Attributes:
        name: the law's name.
        formula: the formula, for people.
        source: the publication that it comes from.
        symbols: the symbols of its parameters, each 0 or above, with their meanings.
        largest: the largest value of each parameter.
        speedup: the function from an array of worker numbers and the parameters to the speedups.
    """

    name: str
    formula: str
    source: str
    symbols: Mapping[str, str]
    largest: float
    speedup: Formula


AMDAHL = Law(
    "Amdahl",
    "S(W) = 1 / (s + (1 − s)/W)",
    "Amdahl, AFIPS 1967",
    {"s": "serial share of the work"},
    1.0,
    lambda workers, p: 1 / (p[0] + (1 - p[0]) / workers),
)
GUSTAFSON = Law(
    "Gustafson",
    "S(W) = W − s(W − 1)",
    "Gustafson, CACM 1988",
    {"s": "serial share of a step's time"},
    1.0,
    lambda workers, p: workers - p[0] * (workers - 1),
)
USL = Law(
    "universal scalability law",
    "S(W) = W / (1 + σ(W − 1) + κW(W − 1))",
    "Gunther, 1993",
    {"σ": "contention: waiting for what is shared", "κ": "coherence: each worker with each other one"},
    math.inf,
    lambda workers, p: workers / (1 + p[0] * (workers - 1) + p[1] * workers * (workers - 1)),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """A law with its parameters.

    Attributes:
        law: the law that was fitted.
        parameters: the parameters by symbol, each with its interval.
        rate: the fitted throughput of one worker, in samples per second.
        misfit: the largest deviation of the fit from a median, as a share of that.
        figures: the number of figures that it was fitted to.
        values: the logarithm of ``rate``, and the parameters.
        covariance: the parameters' covariance; None if there are as many unknowns as figures, so that no interval can
            be given.
        quantile: the quantile of Student's t.
        bic: Schwarz's criterion; of two fits to the same figures the one with the lower is the better explanation.
    """

    law: Law
    parameters: Mapping[str, Estimate]
    rate: float
    misfit: float
    figures: int
    values: Sequence[float]
    covariance: Array | None
    quantile: float
    bic: float

    def speedup(self, workers: float) -> float:
        """As the law has it."""
        return float(self.law.speedup(np.array([float(workers)]), np.array(self.values[1:]))[0])

    def samples_per_s(self, workers: float) -> Estimate:
        """A prediction of the throughput, with the interval of its mean."""
        found = self.rate * self.speedup(workers)
        if self.covariance is None:
            return Estimate(found)
        slopes = _slopes(self.law, np.array([float(workers)]), np.array(self.values))[0]
        wide = self.quantile * math.sqrt(max(float(slopes @ self.covariance @ slopes), 0.0))
        wide = min(wide, 50.0)  # exp() of what nobody knows
        return Estimate(found, found * math.exp(-wide), found * math.exp(wide))


def fitted(law: Law, measured: Mapping[int, Sequence[float]]) -> Fit | None:
    """Fit a law and the throughput of one worker: least squares of the logarithms, as noise is a share of a figure.

    The parameters' intervals come from their covariance and Student's t, without bounds: a figure whose true value is 0
    has an interval that reaches below 0 as often as not; it ends at the bounds here, and so does the figure itself.

    Args:
        law: the law to fit.
        measured: samples per second of each run, by workers.

    Returns:
        the fit; None if there are fewer numbers of workers than the law has unknowns.
    """
    if len(measured) < 1 + len(law.symbols):
        return None
    from scipy.optimize import least_squares  # takes a second to load
    from scipy.stats import t

    workers = np.array([float(number) for number, rates in measured.items() for _ in rates])
    logs = np.log([rate for rates in measured.values() for rate in rates])
    start = np.array([float(np.mean(logs - np.log(workers))), *([0.05] if len(law.symbols) == 1 else [0.05, 0.001])])
    most = 1 - 1e-9 if law.largest == 1 else law.largest
    lowest, highest = [-math.inf, *[0.0] * len(law.symbols)], [math.inf, *[most] * len(law.symbols)]

    def misfits(values: Array) -> Array:
        return _logs(law, workers, values) - logs

    inside = least_squares(misfits, start, bounds=(lowest, highest), x_scale=[1, *[0.01] * len(law.symbols)]).x
    free = least_squares(misfits, inside, x_scale=[1, *[0.01] * len(law.symbols)]).x
    left = len(logs) - len(start)
    covariance, quantile = None, 0.0
    if left > 0:
        slopes = _slopes(law, workers, free)
        covariance = np.linalg.pinv(slopes.T @ slopes) * float(misfits(free) @ misfits(free)) / left
        quantile = float(t.ppf((1 + COVERED) / 2, left))
    widths = [math.nan] * len(start) if covariance is None else quantile * np.sqrt(np.diag(covariance))
    found = {
        symbol: _bounded(float(inside[place]), float(free[place]), float(widths[place]), law.largest)
        for place, symbol in enumerate(law.symbols, 1)
    }
    squares = max(float(misfits(inside) @ misfits(inside)), 1e-18)
    bic = len(logs) * math.log(squares / len(logs)) + len(start) * math.log(len(logs))
    medians = {number: float(np.median(rates)) for number, rates in measured.items()}
    fit = Fit(law, found, math.exp(inside[0]), 0.0, len(logs), tuple(map(float, inside)), covariance, quantile, bic)
    misfit = max(abs(fit.rate * fit.speedup(number) / rate - 1) for number, rate in medians.items())
    return replace(fit, misfit=misfit)


def _logs(law: Law, workers: Array, values: Array) -> Array:
    """Of the throughput, with the logarithm of one worker's in front of the parameters."""
    found: Array = values[0] + np.log(np.maximum(law.speedup(workers, values[1:]), SMALLEST))
    return found


def _slopes(law: Law, workers: Array, values: Array) -> Array:
    """Derivatives of the logarithms by each unknown, by central differences."""
    columns = []
    for place in range(len(values)):
        step = np.zeros(len(values))
        step[place] = 1e-6
        columns.append((_logs(law, workers, values + step) - _logs(law, workers, values - step)) / 2e-6)
    return np.stack(columns, axis=1)


def _bounded(value: float, free: float, width: float, largest: float) -> Estimate:
    if math.isnan(width):
        return Estimate(value)
    low, high = (min(max(end, 0.0), largest) for end in (free - width, free + width))
    return Estimate(value, min(low, value), max(high, value)) if low < high else Estimate(value)
