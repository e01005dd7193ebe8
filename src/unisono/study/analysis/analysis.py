"""All that follows from a study's figures, before it is put into words and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.adapt.step_time import StepTime
from unisono.study.analysis.batch_curve import BatchCurve
from unisono.study.analysis.laws import AMDAHL, GUSTAFSON, USL, Fit, fitted
from unisono.study.analysis.recommendation import EFFICIENT, Prices, Recommendation, recommended
from unisono.study.analysis.results import Mode, Results
from unisono.study.analysis.step_model import StepModel, fitted_step_time, step_model
from unisono.study.analysis.summary import Row, Summary, summarized

LAWS = {"strong": (AMDAHL, USL), "weak": (GUSTAFSON, USL)}
"""Amdahl's keeps the work, Gustafson's lets it grow with the workers."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader of a study wants to know.

    Attributes:
        title: of the report.
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
    """One label in one mode.

    Attributes:
        mode: strong or weak.
        label: of what was measured.
        rows: all numbers of workers, fewest first.
        plain: the plain loops, with the threads of one worker or of more; none if they were not measured.
        fits: of the laws that there are figures enough for.
        model: of a step, from its parts; None if they were not measured.
        step_time: as policies fit it; None if steps were not measured.
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
    def best_fit(self) -> Fit | None:
        """The one to predict with: the better explanation, of those that have fewer unknowns than there are figures."""
        known = [fit for fit in self.fits if fit.covariance is not None] or self.fits[:1]
        return min(known, key=lambda fit: fit.bic, default=None)


@dataclass(frozen=True, slots=True)
class Analysis:
    """A study and what follows from it.

    Attributes:
        results: what was measured.
        wanted: by the reader.
        summary: medians and ratios.
        curves: strong ones first.
        batches: of the batch size search, by label.
    """

    results: Results
    wanted: Wanted
    summary: Summary
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
    return Analysis(results, wanted, summary, curves, batches or {})


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
