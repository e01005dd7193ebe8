"""The verdict of a study, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono_lab.study.analysis import PARTS, Analysis, Curve, Prices, Row
from unisono_lab.study.estimate import counted, duration, interval, listed, number, percent, shown
from unisono_lab.study.study_folder import Kind


def verdict(analysis: Analysis) -> list[str]:
    """A verdict for each curve: the speedup, or the reason why there is none."""
    if not analysis.curves:
        return ["No run succeeded, so there is no verdict."]
    return [named(analysis, curve, _verdict(curve)) for curve in analysis.curves]


def advice(analysis: Analysis) -> list[str]:
    """The recommended numbers of workers of each curve: for time, for efficiency and for cost."""
    return [named(analysis, curve, words) for curve in analysis.curves if (words := _advice(curve, analysis))]


def explanations(analysis: Analysis) -> list[str]:
    """The reason why each curve is not linear, if parts of steps were measured."""
    return [named(analysis, curve, words) for curve in analysis.curves if (words := _why_not_linear(curve))]


def name_of(analysis: Analysis, curve: Curve) -> str:
    """The name of a curve among those of a study; empty if it is not needed."""
    label = shown(curve.label)
    mode = f"{curve.mode} scaling" if len(analysis.modes) > 1 or curve.mode == "weak" else ""
    return ", ".join(part for part in (label, mode) if part)


def named(analysis: Analysis, curve: Curve, words: str) -> str:
    """Words about a curve, after its name if it has one."""
    name = name_of(analysis, curve)
    return f"{name}: {words}" if name else words


def _verdict(curve: Curve) -> str:
    if curve.crowded and len(curve.usable) < 2:
        workers = listed([str(row.workers) for row in curve.crowded], "or")
        return (
            f"This is no measurement of scaling: {workers} workers were more than the machine has cores for, so they "
            f"took turns on them. Their times are below; speedups are not given, for they would say nothing."
        )
    if len(curve.usable) < 2:
        workers, verb = counted(curve.rows[0].workers, "worker"), "was" if curve.rows[0].workers == 1 else "were"
        return f"Only {workers} {verb} measured: scaling takes two numbers of workers."
    chosen = curve.advice.fastest if curve.advice else curve.usable[-1]
    crowded = _and_crowded(curve)
    alone = curve.usable[0]
    if chosen.speedup is None:
        trained = f"{counted(chosen.workers, 'worker')} trained {number(chosen.samples_per_s.value)} samples/s"
        return f"{trained}; one worker was not measured, so there is no speedup.{crowded}"
    if chosen.workers == 1:
        others = curve.usable[1:]
        is_certain = all(row.speedup is not None and row.speedup.value <= 1 for row in others)
        words = "More workers do not pay" if is_certain else "No gain by more workers stands out of the noise"
        return f"{words}: {_no_faster(others)}.{crowded}"
    bounds = interval(chosen.speedup)
    within = f" (95 % interval {bounds})" if bounds else ""
    assert chosen.efficiency is not None, "it follows from the speedup"
    return (
        f"{counted(chosen.workers, 'worker')} train {number(chosen.speedup.value)} times as fast as one{within}: "
        f"{number(chosen.samples_per_s.value)} instead of {number(alone.samples_per_s.value)} samples/s"
        f"{_epochs(alone, chosen)}, an efficiency of {percent(chosen.efficiency.value)}.{crowded}"
    )


def _epochs(alone: Row, chosen: Row) -> str:
    if alone.epoch_s is None or chosen.epoch_s is None:
        return ""
    return f", an epoch in {duration(chosen.epoch_s.value)} instead of {duration(alone.epoch_s.value)}"


def _no_faster(others: Sequence[Row]) -> str:
    parts = []
    for row in others:
        if row.speedup is not None:
            bounds = interval(row.speedup)
            within = f" (95 % interval {bounds})" if bounds else ""
            parts.append(f"{row.workers} workers reach {number(row.speedup.value)} times{within}")
    return f"{listed(parts)} the throughput of one"


def _and_crowded(curve: Curve) -> str:
    if not curve.crowded:
        return ""
    workers = listed([str(row.workers) for row in curve.crowded])
    return f" Runs with {workers} workers say nothing about scaling: there were not cores enough for them."


def _advice(curve: Curve, analysis: Analysis) -> str:
    recommendation, settings = curve.advice, analysis.settings
    if recommendation is None:
        return ""
    parts = [f"{counted(recommendation.fastest.workers, 'worker')} for the shortest time"]
    if recommendation.efficient is not None:
        parts.append(
            f"at most {recommendation.efficient.workers} for an efficiency of at least {percent(settings.threshold)}"
        )
    if recommendation.cheapest is not None and settings.prices is not None:
        unit = "an epoch" if recommendation.of_epochs else "a million samples"
        costs = {
            row.workers: f"{recommendation.costs[row.workers]:.3g}"
            for row in (recommendation.cheapest, recommendation.fastest)
        }
        cost_words = ", ".join(f"{cost} with {workers}" for workers, cost in costs.items())
        price = _price(settings.prices)
        parts.append(f"{recommendation.cheapest.workers} for the lowest cost ({unit} costs {cost_words}; {price})")
    return f"Recommended, of the measured numbers: {'; '.join(parts)}."


def _price(prices: Prices) -> str:
    hour = f"a worker's hour at {number(prices.worker)}"
    return f"{hour}, an hour of waiting at {number(prices.waiting)}" if prices.waiting else hour


def _why_not_linear(curve: Curve) -> str:
    """The parts of a step that take the additional time, against perfect scaling, with the most workers."""
    alone, top = curve.alone, curve.usable[-1] if curve.usable else None
    if alone is None or top is None or top is alone:
        return ""
    first, last = alone.parts, top.parts
    if not first or not last or not top.step_s or not alone.step_s:
        return ""
    share = 1 if curve.mode == "weak" else top.workers
    lost = {field: last[field] - first.get(field, 0.0) / share for field in last}
    total = top.step_s - alone.step_s / share
    if total <= 0.01 * top.step_s:
        return f"With {top.workers} workers a step takes no longer than with perfect scaling."
    large = sorted((field for field in lost if lost[field] > 0.05 * total), key=lambda field: -lost[field])
    parts = [f"{PARTS[field]} {duration(lost[field])}" for field in large]
    reasons = f": {listed(parts)}" if parts else ", which no measured part accounts for"
    return (
        f"With {top.workers} workers a step takes {duration(top.step_s)}, {duration(total)} more than with perfect "
        f"scaling{reasons}."
    )


# Whether all numbers of workers trained to the same weights.

ALIKE = 1e-5
"""The largest relative difference of losses that rounding alone explains."""


def correctness(curve: Curve) -> str:
    """A sentence or two about the digests and the losses."""
    rows = [row for row in curve.rows if row.digests]
    unsteady = [str(row.workers) for row in rows if len(row.digests) > 1]
    if unsteady:
        return (
            f"Repeated runs with {listed(unsteady)} workers ended with different weights: the training is not "
            f"deterministic (or the runs were not alike), so its losses are compared with care."
        )
    digests = {digest for row in rows for digest in row.digests}
    if curve.mode == "strong" and len(digests) == 1 and len(rows) > 1:
        workers = listed([str(row.workers) for row in rows])
        more = "" if len(rows) == len(curve.rows) else " (the others recorded no digest)"
        runs = sum(len(row.cells) for row in rows)
        return (
            f"All {runs} runs with {workers} workers ended with the same weights, bit for bit{more}: SHA-256 "
            f"{next(iter(digests))[:16]}…"
        )
    if curve.mode == "strong" and len(digests) > 1:
        return f"Different numbers of workers ended with different weights. {_losses(curve.rows)}"
    return _losses(curve.rows, weak=curve.mode == "weak")


def _losses(rows: Sequence[Row], *, weak: bool = False) -> str:
    with_loss = [row for row in rows if row.loss is not None]
    if len(with_loss) < 2:
        return (
            "Neither digests nor losses were recorded for two numbers of workers: nothing shows that all trained alike."
        )
    losses = [row.loss for row in with_loss if row.loss is not None]
    listing = listed([f"{number(row.loss)} with {row.workers}" for row in with_loss])
    if weak:
        return f"The batch grows with the workers, so the weights differ; losses after the same samples: {listing}."
    difference = (max(losses) - min(losses)) / max(abs(loss) for loss in losses) if any(losses) else 0.0
    if difference <= ALIKE:
        return f"Losses after the same samples are alike (within {difference:.1e} of each other): {listing}."
    return f"Losses after the same samples differ by up to {100 * difference:.2g} %: {listing}."


# Threats to the validity of a study's figures, as far as the figures show them.

FEW = 5
"""The number of repeats below which the report warns (Hoefler and Belli, SC 2015)."""

NOISY = 0.1
"""The width of an interval, as a share of its median, above which the report warns."""

MISFIT = 0.1
"""The deviation of a fit from a median, as a share, above which the report warns."""


def threats(analysis: Analysis) -> list[str]:
    """Sentences about threats to validity, the gravest first; those that hold for all curves come once."""
    names_by_words: dict[str, list[str]] = {}
    for curve in analysis.curves:
        for words in _of_curve(curve):
            names_by_words.setdefault(words, []).append(name_of(analysis, curve))
    named = [
        words if len(names) == len(analysis.curves) else f"{'; '.join(names)}: {words}"
        for words, names in names_by_words.items()
    ]
    return [*_failed(analysis), *named, *_of_all(analysis), *analysis.results.notes]


def _failed(analysis: Analysis) -> Iterator[str]:
    cells = analysis.results.cells
    failed = [f"{Kind(cell.mode, cell.workers)} (exit code {cell.exit_code})" for cell in cells if cell.exit_code]
    if failed:
        are = "is" if len(failed) == 1 else "are"
        which = "; ".join(dict.fromkeys(failed))
        yield f"{len(failed)} of {counted(len(cells), 'run')} failed and {are} in no figure: {which}."


def _of_curve(curve: Curve) -> Iterator[str]:
    rows = curve.rows
    if curve.crowded:
        workers = listed([str(row.workers) for row in curve.crowded])
        yield (
            f"Oversubscription: {workers} workers shared the machine's cores. Their times are shown, and left out of "
            f"speedups, fits and advice."
        )
    if rows[0].workers != 1:
        yield "One worker was not measured, so there is no speedup, and fits rest on more than one worker alone."
    yield from _repeats(curve)
    yield from _noise(curve)
    for fit in curve.fits:
        if fit.misfit > MISFIT:
            words = f"The fit of {fit.law.name} misses a median by {percent(fit.misfit)}"
            yield f"{words}: do not trust its predictions further than that."
    if curve.fits and len(curve.usable) < 4:
        yield f"The fits rest on {len(curve.usable)} numbers of workers: what they predict beyond them is a guess."


def _repeats(curve: Curve) -> Iterator[str]:
    fewest = min(len(row.repeats) or 1 for row in curve.rows)
    if all(not row.repeats and len(row.rates) > 1 for row in curve.rows):
        yield "Each number of workers was run once: intervals are over epochs, and miss what differs between runs."
    elif fewest == 1:
        yield "Some figures rest on a single run and have no interval: how much another run would differ is unknown."
    elif fewest < FEW:
        yield f"Intervals rest on {fewest} repeats: with fewer than {FEW} they are too narrow too often."


def _noise(curve: Curve) -> Iterator[str]:
    spreads = [(row.workers, row.samples_per_s.spread or 0.0) for row in curve.rows]
    wide = [f"{percent(spread)} with {counted(workers, 'worker')}" for workers, spread in spreads if spread > NOISY]
    widths = listed(wide)
    if widths:
        yield f"Noise: the interval of the throughput is as wide as {widths}. Something else may have used the machine."


def _of_all(analysis: Analysis) -> Iterator[str]:
    if not analysis.curves:
        return
    if not any(curve.plain for curve in analysis.curves):
        yield "The plain single-process loop was not measured: speedups are against one worker of the same software."
    if not analysis.results.environment:
        yield "The machine and its software are unknown: the figures were measured elsewhere."
    yield "One machine at one time: another processor, network, model or batch has another curve."
