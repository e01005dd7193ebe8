"""What speaks against a study's figures, as far as the figures themselves tell."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.study.analysis import Analysis, Curve
from unisono.study.summary import Row
from unisono.study.verdict import name_of
from unisono.study.wording import counted, listed, percent

FEW = 5
"""Repeats, at least, that intervals should rest on (Hoefler and Belli, SC 2015)."""

NOISY = 0.1
"""Width of an interval, as a share of its median, that is worth a word."""

MISFIT = 0.1
"""Deviation of a fit from a median that is worth a word."""


def threats(analysis: Analysis) -> list[str]:
    """In sentences, the gravest first."""
    found = [*_failed(analysis)]
    for curve in analysis.curves:
        name = name_of(analysis, curve)
        found += [f"{name}: {words}" if name else words for words in _of_curve(curve)]
    return [*found, *_of_all(analysis), *analysis.results.notes]


def _failed(analysis: Analysis) -> Iterator[str]:
    failed = analysis.summary.failed
    if failed:
        which = listed(
            list(dict.fromkeys(f"{counted(one.workers, 'worker')} (exit code {one.exit_code})" for one in failed))
        )
        total = len(analysis.results.cells)
        yield f"{len(failed)} of {counted(total, 'run')} failed and are in no figure: {which}. What is left may be biased."


def _of_curve(curve: Curve) -> Iterator[str]:
    rows = curve.rows
    if curve.crowded:
        workers = listed([str(row.workers) for row in curve.crowded])
        yield (
            f"Oversubscription: {workers} workers shared the machine's cores. Their times are shown, and left out of "
            f"speedups, fits and advice."
        )
    if rows[0].workers != 1:
        yield "One worker was not measured, so there is no speedup, and a fit rests on more than one worker alone."
    fewest = min(len(row.repeats) or 1 for row in rows)
    if all(not row.repeats and len(row.rates) > 1 for row in rows):
        yield "Each number of workers was run once: intervals are over the epochs of that run and miss what differs between runs."
    elif fewest == 1:
        yield "Some figures rest on a single run and have no interval: how far they would be off in another run is unknown."
    elif fewest < FEW:
        yield f"Intervals rest on {fewest} repeats; with fewer than {FEW} they are too narrow more often than 5 times in 100."
    yield from _noise(curve)
    yield from _settings(curve)
    yield from _first_epochs(curve)
    for fit in curve.fits:
        if fit.misfit > MISFIT:
            yield f"The fit of {fit.law.name} misses a median by {percent(fit.misfit)}: its predictions are worth as little."
    if curve.fits and len(curve.usable) < 4:
        yield f"The fits rest on {len(curve.usable)} numbers of workers; predictions reach beyond them and are only that."


def _noise(curve: Curve) -> Iterator[str]:
    wide = {row: spread for row in curve.rows if (spread := row.samples_per_s.spread) is not None and spread > NOISY}
    if wide:
        said = listed([f"{percent(spread)} with {row.workers}" for row, spread in _by_workers(wide)])
        yield f"Noise: the throughput's interval is wide, {said} workers. Something else may have used the machine."


def _by_workers(wide: dict[Row, float]) -> list[tuple[Row, float]]:
    return sorted(wide.items(), key=lambda pair: pair[0].workers)


def _settings(curve: Curve) -> Iterator[str]:
    batches = {cell.batch_size for row in curve.rows for cell in row.cells if cell.batch_size}
    shares = {cell.batch_size / row.workers for row in curve.rows for cell in row.cells if cell.batch_size}
    if curve.mode == "strong" and len(batches) > 1:
        yield f"The global batch is not the same in all runs ({listed([*map(str, sorted(batches))])}): this is not strong scaling."
    if curve.mode == "weak" and len(shares) > 1:
        yield "The batch per worker is not the same in all runs: this is not weak scaling."


def _first_epochs(curve: Curve) -> Iterator[str]:
    if any(cell.epoch == 1 for row in curve.rows for cell in row.cells):
        yield "Some runs have a first epoch only, and it counts: it holds what happens once, such as starting and filling caches."


def _of_all(analysis: Analysis) -> Iterator[str]:
    curves = analysis.curves
    if curves and not any(curve.baseline for curve in curves):
        yield "The plain single-process loop was not measured: speedups are against one worker of Unisono or of whatever was run."
    if curves and not analysis.results.environment:
        yield "Nothing is known of the machine and its software: the figures were measured elsewhere."
    if curves:
        yield "One machine at one time: another processor, network, model or batch has another curve."
