"""The verdict of a study, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from unisono_lab.analysis.analysis import Analysis, Curve
from unisono_lab.analysis.estimate import Estimate, counted, duration, interval, listed, number, percent, shown
from unisono_lab.analysis.recommendation import Prices
from unisono_lab.analysis.summary import PARTS, Row


def verdict(analysis: Analysis) -> list[str]:
    """A sentence for each curve: what workers brought, or why nothing can be said of it."""
    if not analysis.curves:
        return ["No run succeeded, so there is nothing to say."]
    return [named(analysis, curve, _verdict(curve)) for curve in analysis.curves]


def advice(analysis: Analysis) -> list[str]:
    """For each curve: how many workers to take for time, for efficiency and for cost."""
    found = ((curve, _advice(curve, analysis)) for curve in analysis.curves)
    return [named(analysis, curve, words) for curve, words in found if words]


def explanations(analysis: Analysis) -> list[str]:
    """For each curve: why it is not linear, as far as parts of steps were measured."""
    found = ((curve, _why_not_linear(curve)) for curve in analysis.curves)
    return [named(analysis, curve, words) for curve, words in found if words]


def overheads(analysis: Analysis) -> list[str]:
    """For each label: its workers beside the plain loop with equal threads."""
    found: dict[str, str] = {}
    for curve in analysis.curves:
        beside = [(row.workers, row.over_equal) for row in curve.usable if row.over_equal is not None]
        if beside:
            said = listed([_beside_plain(workers, over) for workers, over in beside])
            label = f"{shown(curve.label)}: " if curve.label else ""
            threads = "with equal threads " if beside[-1][0] > 1 else ""
            found.setdefault(label, f"{label}Beside the plain loop {threads}the throughput is {said}.")
    return list(found.values())


def _beside_plain(workers: int, over: Estimate) -> str:
    who = "one worker" if workers == 1 else f"{workers} workers"
    ends = interval(over, "percent")
    return f"{percent(over.value)}{f' ({ends})' if ends else ''} with {who}"


def name_of(analysis: Analysis, curve: Curve) -> str:
    """Of a curve among the others of a study; empty if it is the only one."""
    label = shown(curve.label)
    mode = f"{curve.mode} scaling" if len(analysis.modes) > 1 or curve.mode == "weak" else ""
    return ", ".join(part for part in (label, mode) if part)


def named(analysis: Analysis, curve: Curve, words: str) -> str:
    """Words about a curve, behind its name if it is not the only one."""
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
        workers, were = counted(curve.rows[0].workers, "worker"), "was" if curve.rows[0].workers == 1 else "were"
        return f"Only {workers} {were} measured: scaling takes two numbers of workers."
    chosen = curve.advice.fastest if curve.advice else curve.usable[-1]
    crowded = _and_crowded(curve)
    alone = curve.usable[0]
    if chosen.speedup is None:
        trained = f"{counted(chosen.workers, 'worker')} trained {number(chosen.samples_per_s.value)} samples/s"
        return f"{trained}; one worker was not measured, so there is no speedup.{crowded}"
    if chosen.workers == 1:
        others = curve.usable[1:]
        surely = all(row.speedup is not None and row.speedup.value <= 1 for row in others)
        words = "More workers do not pay" if surely else "No gain by more workers stands out of the noise"
        return f"{words}: {_no_faster(others)}.{crowded}"
    ends = interval(chosen.speedup)
    sure = f" (95 % interval {ends})" if ends else ""
    assert chosen.efficiency is not None, "it follows from the speedup"
    return (
        f"{counted(chosen.workers, 'worker')} train {number(chosen.speedup.value)} times as fast as one{sure}: "
        f"{number(chosen.samples_per_s.value)} instead of {number(alone.samples_per_s.value)} samples/s"
        f"{_epochs(alone, chosen)}, an efficiency of {percent(chosen.efficiency.value)}.{crowded}"
    )


def _epochs(alone: Row, chosen: Row) -> str:
    if alone.epoch_s is None or chosen.epoch_s is None:
        return ""
    return f", an epoch in {duration(chosen.epoch_s.value)} instead of {duration(alone.epoch_s.value)}"


def _no_faster(others: Sequence[Row]) -> str:
    said = []
    for row in others:
        if row.speedup is not None:
            ends = interval(row.speedup)
            sure = f" (95 % interval {ends})" if ends else ""
            said.append(f"{row.workers} workers reach {number(row.speedup.value)} times{sure}")
    return f"{listed(said)} the throughput of one"


def _and_crowded(curve: Curve) -> str:
    if not curve.crowded:
        return ""
    workers = listed([str(row.workers) for row in curve.crowded])
    return f" Runs with {workers} workers say nothing about scaling: there were not cores enough for them."


def _advice(curve: Curve, analysis: Analysis) -> str:
    found, wanted = curve.advice, analysis.wanted
    if found is None:
        return ""
    said = [f"{counted(found.fastest.workers, 'worker')} for the shortest time"]
    if found.efficient is not None:
        said.append(f"at most {found.efficient.workers} for an efficiency of at least {percent(wanted.threshold)}")
    if found.cheapest is not None and wanted.prices is not None:
        what = "an epoch" if found.of_epochs else "a million samples"
        costs = {row.workers: f"{found.costs[row.workers]:.3g}" for row in (found.cheapest, found.fastest)}
        beside = ", ".join(f"{cost} with {workers}" for workers, cost in costs.items())
        price = _price(wanted.prices)
        said.append(f"{found.cheapest.workers} for the lowest cost ({what} costs {beside}; {price})")
    return f"Recommended, of the numbers that were measured: {'; '.join(said)}.{_beyond(curve)}"


def _beyond(curve: Curve) -> str:
    """What the fit says of more workers."""
    fit = curve.best_fit
    if fit is None or fit.best is None or fit.misfit > 0.2:
        return ""
    most = curve.usable[-1].workers
    if fit.best > 8 * most:
        return ""
    return f" Prediction of the {fit.law.name}: beyond about {max(1, round(fit.best))} workers more of them are slower."


def _price(prices: Prices) -> str:
    hour = f"a worker's hour at {number(prices.worker)}"
    return f"{hour}, an hour of waiting at {number(prices.waiting)}" if prices.waiting else hour


def _why_not_linear(curve: Curve) -> str:
    """Where the time of the largest number of workers went, that a perfect speedup would not have taken."""
    if len(curve.usable) < 2 or curve.usable[0].workers != 1:
        return ""
    alone, most = curve.usable[0], curve.usable[-1]
    first, then = alone.parts, most.parts
    if not first or not then or not most.step_s or not alone.step_s:
        return ""
    share = 1 if curve.mode == "weak" else most.workers
    lost = {field: then[field] - first.get(field, 0.0) / share for field in then}
    total = most.step_s - alone.step_s / share
    if total <= 0.01 * most.step_s:
        return f"With {most.workers} workers a step takes no longer than with perfect scaling."
    large = sorted((field for field in lost if lost[field] > 0.05 * total), key=lambda field: -lost[field])
    parts = [f"{PARTS[field]} {duration(lost[field])}" for field in large]
    said = f": {listed(parts)}" if parts else ", which no measured part accounts for"
    return (
        f"With {most.workers} workers a step takes {duration(most.step_s)}, {duration(total)} more than with perfect "
        f"scaling{said}."
    )
