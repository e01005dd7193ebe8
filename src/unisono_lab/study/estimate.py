"""Figures with confidence intervals, their text, and laws of scaling that are fitted to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

COVERED = 0.95

DRAWS = 5000

SEED = 0
"""The seed of the bootstrap, fixed so that the same figures have the same intervals."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and the interval in which it lies with 95 % confidence: None if it was measured once."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def spread(self) -> float | None:
        """The interval's width as a share of the figure."""
        return None if self.low is None or self.high is None or not self.value else (self.high - self.low) / self.value

    def mapped(self, change: Callable[[float], float]) -> Estimate:
        """The estimate of a function of the figure, which must be monotonic."""
        if self.low is None or self.high is None:
            return Estimate(change(self.value))
        low, high = sorted((change(self.low), change(self.high)))
        return Estimate(change(self.value), low, high)


def median(values: Sequence[float]) -> Estimate:
    """The median with its bootstrap interval (percentiles; Hoefler and Belli, SC 2015, section 3.1.3)."""
    return Estimate(float(np.median(values)), *_ends(_drawn_medians(values, _draws(len(values)))))


def ratio(values: Sequence[float], others: Sequence[float], *, paired: bool) -> Estimate:
    """The ratio of two medians with its bootstrap interval; without one if either was measured once.

    Paired values of the same place were measured one after the other; they are drawn together, so that a disturbance of
    both does not widen the interval.
    """
    own_draws = _draws(len(values))
    other_draws = own_draws if paired else _draws(len(others), seed=SEED + 1)
    is_repeated = min(len(values), len(others)) > 1  # a single measurement says nothing of its error
    drawn = _drawn_medians(values, own_draws) / _drawn_medians(others, other_draws)
    return Estimate(float(np.median(values) / np.median(others)), *_ends(drawn if is_repeated else drawn[:0]))


def _draws(count: int, seed: int = SEED) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(count, size=(DRAWS, count))


def _drawn_medians(values: Sequence[float], draws: NDArray[np.int64]) -> Array:
    medians: Array = np.median(np.asarray(values, dtype=float)[draws], axis=1)
    return medians


def _ends(drawn: Array) -> tuple[float | None, float | None]:
    if not drawn.size or float(drawn.min()) == float(drawn.max()):
        return None, None
    low, high = np.quantile(drawn, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return float(low), float(high)


# Figures as text.

JOINED = "\u00a0"
"""A space at which no line is broken."""

NOTHING = "–"  # noqa: RUF001 (a dash in an empty field)


def number(value: float | None) -> str:
    """The value with two to four significant digits: ``1111``, ``45.0``, ``1.88``, ``0.0031``."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.1 or size == 0:
        return f"{value:.2f}"
    return f"{value:.2g}" if size >= 1e-4 else f"{value:.1e}"


def percent(share: float | None) -> str:
    """``94 %``, ``1.9 %``."""
    if share is None:
        return NOTHING
    digits = 0 if abs(share) >= 0.0995 or share == 0 else 1
    return f"{100 * share:.{digits}f}{JOINED}%"


def duration(seconds: float | None) -> str:
    """``12.0 s``, ``85 ms``, ``7 min 30 s``."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{number(1000 * seconds)} ms"
    if seconds < 300:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def interval(estimate: Estimate | None, form: str = "number") -> str:
    """The ends alone, with as many digits as the figure: ``3.61 … 3.89``; empty if there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    if form == "percent":
        return f"{100 * estimate.low:.1f} … {100 * estimate.high:.1f} %"
    return f"{_fixed(estimate.low, estimate.value)} … {_fixed(estimate.high, estimate.value)}"


def shown(label: str, most: int = 48) -> str:
    """A user's label on one line of limited length, without characters that cannot be printed."""
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in label).split())
    return words if len(words) <= most else f"{words[: most - 1]}…"


def counted(count: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def _fixed(end: float, value: float) -> str:
    size = abs(value)
    digits = 2 if size == 0 else max(0, min(2, 2 - math.floor(math.log10(size)))) if size >= 0.1 else 4
    return f"{end:.{digits}f}"


Formula = Callable[[Array, Array], Array]

SMALLEST = 1e-9
"""The least speedup while a law is fitted: its logarithm must exist."""


@dataclass(frozen=True, slots=True)
class Law:
    """Speedup as a function of the number of workers.

    Attributes:
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
        parameters: the parameters by symbol, each with its interval.
        rate: the fitted throughput of one worker, in samples per second.
        misfit: the largest deviation of the fit from a median, as a share of that.
        figures: the number of figures that it was fitted to.
        values: the logarithm of ``rate``, and the parameters.
        covariance: the parameters' covariance; None if there are as many unknowns as figures, so that no interval can
            be given.
        quantile: the quantile of Student's t, for intervals.
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
        """The speedup by the law."""
        return float(self.law.speedup(np.array([float(workers)]), np.array(self.values[1:]))[0])

    def samples_per_s(self, workers: float) -> Estimate:
        """A prediction of the throughput, with the interval of its mean."""
        rate = self.rate * self.speedup(workers)
        if self.covariance is None:
            return Estimate(rate)
        slopes = _slopes(self.law, np.array([float(workers)]), np.array(self.values))[0]
        width = self.quantile * math.sqrt(max(float(slopes @ self.covariance @ slopes), 0.0))
        width = min(width, 50.0)  # exp() of a huge width would overflow
        return Estimate(rate, rate * math.exp(-width), rate * math.exp(width))


def fitted(law: Law, measured: Mapping[int, Sequence[float]]) -> Fit | None:
    """Fit a law and the throughput of one worker: least squares of the logarithms, as noise is a share of a figure.

    The parameters' intervals come from their covariance and Student's t, in a fit without bounds: a parameter whose
    true value is 0 then often has an interval that reaches below 0. Intervals and parameters are cut at the bounds.
    Measured are samples per second of each run, by workers. There is no fit to fewer numbers of workers than the law
    has unknowns.
    """
    if len(measured) < 1 + len(law.symbols):
        return None
    from scipy.optimize import least_squares  # takes a second to load
    from scipy.stats import t

    workers = np.array([float(number) for number, rates in measured.items() for _ in rates])
    logs = np.log([rate for rates in measured.values() for rate in rates])
    start = np.array([float(np.mean(logs - np.log(workers))), *([0.05] if len(law.symbols) == 1 else [0.05, 0.001])])
    bound = 1 - 1e-9 if law.largest == 1 else law.largest
    lowest, highest = [-math.inf, *[0.0] * len(law.symbols)], [math.inf, *[bound] * len(law.symbols)]

    def misfits(values: Array) -> Array:
        return _logs(law, workers, values) - logs

    inside = least_squares(misfits, start, bounds=(lowest, highest), x_scale=[1, *[0.01] * len(law.symbols)]).x
    free = least_squares(misfits, inside, x_scale=[1, *[0.01] * len(law.symbols)]).x
    degrees = len(logs) - len(start)
    covariance, quantile = None, 0.0
    if degrees > 0:
        slopes = _slopes(law, workers, free)
        covariance = np.linalg.pinv(slopes.T @ slopes) * float(misfits(free) @ misfits(free)) / degrees
        quantile = float(t.ppf((1 + COVERED) / 2, degrees))
    widths = [math.nan] * len(start) if covariance is None else quantile * np.sqrt(np.diag(covariance))
    parameters = {
        symbol: _bounded(float(inside[place]), float(free[place]), float(widths[place]), law.largest)
        for place, symbol in enumerate(law.symbols, 1)
    }
    squares = max(float(misfits(inside) @ misfits(inside)), 1e-18)
    bic = len(logs) * math.log(squares / len(logs)) + len(start) * math.log(len(logs))
    medians = {number: float(np.median(rates)) for number, rates in measured.items()}
    fit = Fit(
        law, parameters, math.exp(inside[0]), 0.0, len(logs), tuple(map(float, inside)), covariance, quantile, bic
    )
    misfit = max(abs(fit.rate * fit.speedup(number) / rate - 1) for number, rate in medians.items())
    return replace(fit, misfit=misfit)


def _logs(law: Law, workers: Array, values: Array) -> Array:
    """The logarithms of the throughput; ``values`` are that of one worker's throughput, then the parameters."""
    logs: Array = values[0] + np.log(np.maximum(law.speedup(workers, values[1:]), SMALLEST))
    return logs


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
