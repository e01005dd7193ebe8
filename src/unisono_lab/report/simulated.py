"""The report of a simulation as a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from unisono_lab.analysis.estimate import NOTHING, counted, duration, number, percent
from unisono_lab.report.document import Block, Document, Field, Section, WrittenTable, fixed_words
from unisono_lab.report.drawing import FAINT, INK, SERIES, Chart, canvas, doubling, explain, from_zero, mark
from unisono_lab.simulation.simulated_run import SimulatedOutcome
from unisono_lab.simulation.simulation import (
    Candidate,
    Expectation,
    Goal,
    Likelihood,
    Margin,
    Simulation,
    commands,
    enough,
    frontier,
    left_out,
    margins,
)


def simulated_document(found: Simulation, pictures: Sequence[Chart], title: str) -> Document:
    """What the report of a simulation says."""
    words = fixed_words("simulation")
    sections = [
        Section("Figures: time and cost", [Block("table", table=_answers(found))]),
        Section("Figures: where the time goes", [Block("table", table=_lost(found))]),
        *_candidates(found),
        Section("Plots", [Block("pictures", pictures=pictures)]),
        Section("Figures: workers", [Block("table", table=_rates(found))]),
        Section("What the figures are from", [Block("table", table=_sources(found))]),
        *_guesses(found),
        Section("What is assumed", [Block("bullets", words["assumed"])]),
        Section("Glossary", [Block("terms", terms=[*words["terms"].items()])]),
    ]
    return Document(title, _verdict(found), _advice(found), sections)


def _verdict(found: Simulation) -> list[str]:
    one = found.variants[0].answer
    said = [
        f"The job takes {_long(one.seconds.p50)} in the median, and {_long(one.seconds.p95)} at most in 95 % of "
        f"{one.seeds} seeds; it costs {number(one.cost.p50)} and {number(one.cost.p95)}."
    ]
    if found.wish.deadline_s is not None:
        said.append(f"It is done within {_long(found.wish.deadline_s)} with a probability of {_likely(one.in_time)}.")
    elif one.in_time.share < 1:
        said.append(
            f"It is done at all with a probability of {_likely(one.in_time)}: what is not is counted as endless."
        )
    if one.in_budget is not None:
        said.append(f"It costs {number(found.wish.budget)} at most with a probability of {_likely(one.in_budget)}.")
    if found.is_extrapolation:
        measured = found.scenario.measured_to
        known = f"no more than {counted(measured, 'worker')} were measured" if measured else "nothing was measured"
        said.append(f"This is an extrapolation: {known}, and the job has room for {found.scenario.room}.")
    return said


def _advice(found: Simulation) -> list[str]:
    most = enough(found.rates)
    more = [rate.workers for rate in found.rates if rate.workers > most]
    fewer = [rate.workers for rate in found.rates if rate.workers < most]
    said = []
    if more:
        said = [
            f"More than {counted(most, 'worker')} no longer pay: {more[0]} are faster by less than 10 %, or slower."
        ]
    elif fewer:
        said = [f"All {counted(most, 'worker')} pay: they are faster than {fewer[-1]} by 10 % or more."]
    if not found.candidates:
        return said
    best = found.candidates[0]
    if not found.wish.holds(best.answer):
        return [*said, f"No candidate is within the limits. The nearest: {best.hosts}."]
    run = [f"On {one.hosts}: {one.words}" for one in commands(best.scenario)]
    beside = [_margin(each, found.wish) for each in margins(found.candidates, found.wish)]
    return [*said, f"Take {_way(best)}.", *run, *left_out(best.scenario), *beside]


def _way(one: Candidate) -> str:
    return f"{one.hosts}, checkpoints {one.checkpoints}, policies {one.policies}"


def _margin(one: Margin, wish: Goal) -> str:
    """What the next best is, and what it costs more."""
    who = "The next best with other hosts" if one.has_other_hosts else "The next best with the same hosts"
    more, less = ("dearer", "cheaper") if wish.aim == "cost" else ("slower", "faster")
    much = (
        f"is {percent(abs(one.share))} {more if one.share > 0 else less}" if abs(one.share) >= 0.001 else "is as good"
    )
    limits = "" if one.holds else ", and is not within the limits"
    return f"{who} ({_way(one.next)}) {much} in the median{limits}."


def _answers(found: Simulation) -> WrittenTable:
    rows = [[one.name, *_fields(one.answer, found.wish)] for one in found.variants]
    return WrittenTable.of(["policies", *_head(found.wish)], rows, text_columns=1)


def _head(wish: Goal) -> list[str]:
    """Of the columns of :func:`_fields`."""
    limits = [name for name, limit in (("in time", wish.deadline_s), ("in budget", wish.budget)) if limit is not None]
    return ["time p50", "time p95", "cost p50", "cost p95", *limits, "workers lost"]


def _fields(one: Expectation, wish: Goal) -> list[Field | str]:
    chances = (one.in_time if wish.deadline_s is not None else None, one.in_budget)
    spread = [_long(one.seconds.p50), _long(one.seconds.p95), number(one.cost.p50), number(one.cost.p95)]
    likely = [Field(percent(each.share), f"{percent(each.low)} … {percent(each.high)}") for each in chances if each]
    return [*spread, *likely, number(one.losses)]


def _lost(found: Simulation) -> WrittenTable:
    parts = list(found.variants[0].answer.lost)
    rows = [[one.name, *(_long(one.answer.lost[part]) for part in parts)] for one in found.variants]
    return WrittenTable.of(["policies", *parts], rows, text_columns=1, note="Means over all seeds.")


def _candidates(found: Simulation) -> list[Section]:
    if not found.candidates:
        return []
    rows = [
        [one.hosts, one.policies, str(one.scenario.job.checkpoint_every or "none"), *_fields(one.answer, found.wish)]
        for one in found.candidates
    ]
    table = WrittenTable.of(["hosts", "policies", "checkpoint every", *_head(found.wish)], rows, text_columns=2)
    best = commands(found.candidates[0].scenario)
    said = [line for one in best for line in (f"# on {one.hosts}", one.words)]
    return [Section("Figures: the best candidates", [Block("table", table=table), Block("code", said)])]


def _rates(found: Simulation) -> WrittenTable:
    first = found.rates[0].samples_per_s
    rows = [
        [
            str(rate.workers),
            number(rate.samples_per_s),
            number(rate.samples_per_s / first),
            "extrapolated" if rate.extrapolated else "measured",
        ]
        for rate in found.rates
    ]
    return WrittenTable.of(["workers", "samples/s", "speedup", "from"], rows)


def _sources(found: Simulation) -> WrittenTable:
    sources = found.scenario.sources
    rows = [[name, sources.get(name, "default"), number(value)] for name, value in found.scenario.figures().items()]
    note = "Seconds, but for gamma, jitter, and shares."
    return WrittenTable.of(["figure", "from", "value"], rows, text_columns=2, note=note)


def _guesses(found: Simulation) -> list[Section]:
    rows = [
        [one.name, f"{number(one.value)} × {number(one.factor)}", _change(one.seconds), _change(one.cost)]
        for one in found.guesses
    ]
    if not rows:
        return []
    note = "Figures that nobody measured, at half and at double their values; those that matter by 0.5 % or more."
    table = WrittenTable.of(["figure", "value", "time", "cost"], rows, text_columns=2, note=note)
    return [Section("Figures: what guesses matter", [Block("table", table=table)])]


def _change(factor: float) -> str:
    return f"{100 * (factor - 1):+.1f} %"


def _likely(one: Likelihood) -> str:
    return f"{percent(one.share)} ({percent(one.low)} … {percent(one.high)})"


def _long(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else NOTHING


# The pictures of a simulation.

HOUR_S = 3600.0


def simulated_charts(found: Simulation) -> list[Chart]:
    """Time and cost of all seeds, a job over time, throughputs, and the candidates if there are any."""
    said = f" An {_beyond(found)}." if found.is_extrapolation else ""
    made = [_spread(found), _course(found), _throughputs(found), *([_frontier(found)] if found.candidates else [])]
    for one in made if said else ():
        one.figure.supxlabel(_beyond(found), x=0.995, ha="right", fontsize="x-small", color=SERIES[1])
    return [replace(one, words=one.words + said) for one in made]


def _beyond(found: Simulation) -> str:
    most = found.scenario.measured_to
    return f"extrapolation beyond {most} workers" if most else "extrapolation: nothing was measured"


def _spread(found: Simulation) -> Chart:
    figure, axis = canvas("hours", "cost")
    for place, variant in enumerate(found.variants):
        done = [each for each in variant.outcomes if each.done]
        points = ([each.seconds / HOUR_S for each in done], [each.cost for each in done])
        axis.scatter(*points, label=variant.name, alpha=0.75, **mark(place))
    if found.wish.deadline_s is not None:
        axis.axvline(found.wish.deadline_s / HOUR_S, color=INK, linestyle=":", label="deadline")
    if found.wish.budget is not None:
        axis.axhline(found.wish.budget, color=INK, linestyle="--", label="budget")
    explain(figure, axis)
    words = "Each mark is a seed: the hours until the job was done, and what all hosts cost until then."
    return Chart("time-and-cost", "Time and cost", words, figure)


def _course(found: Simulation) -> Chart:
    """Of the seed in the middle."""
    outcome = _middle(found)
    figure, axis = canvas("hours", "workers")
    hours = [mark.seconds / HOUR_S for mark in outcome.marks]
    axis.step(hours, [mark.workers for mark in outcome.marks], where="post", color=SERIES[0], label="workers")
    from_zero(axis)
    right = axis.twinx()
    right.spines[["top"]].set_visible(False)
    right.step(hours, [mark.price for mark in outcome.marks], where="post", color=SERIES[1], linewidth=1, label="price")
    right.set_ylabel("price of a worker's hour", color=INK)
    right.set_ylim(0, max(1e-9, 1.3 * max(mark.price for mark in outcome.marks)))
    axis.plot([], [], color=SERIES[1], linewidth=1, label="price")
    explain(figure, axis)
    words = f"Workers, and the price of one, in the job of seed {outcome.seed}, whose time is the median."
    return Chart("course", "One job over time", words, figure)


def _middle(found: Simulation) -> SimulatedOutcome:
    ordered = sorted(found.variants[0].outcomes, key=lambda each: each.seconds if each.done else math.inf)
    return ordered[(len(ordered) - 1) // 2]


def _throughputs(found: Simulation) -> Chart:
    figure, axis = canvas("workers", "samples / s")
    workers = [rate.workers for rate in found.rates]
    doubling(axis, "x")
    axis.plot(workers, [rate.samples_per_s for rate in found.rates], marker="o", color=SERIES[0], label="predicted")
    first = found.rates[0].samples_per_s
    axis.plot(workers, [first * size for size in workers], color=INK, linestyle=":", linewidth=1, label="ideal")
    measured_to = found.scenario.measured_to
    if found.is_extrapolation and measured_to:
        axis.axvspan(measured_to, workers[-1], color=FAINT, alpha=0.5, label="not measured")
    from_zero(axis)
    explain(figure, axis)
    words = (
        "Samples per second of so many workers when nothing goes wrong, by the fitted time of a step with its jitter."
    )
    return Chart("rates", "Throughput by workers", words, figure)


def _frontier(found: Simulation) -> Chart:
    figure, axis = canvas("hours, median", "cost, median")
    done = [one for one in found.tried if math.isfinite(one.answer.seconds.p50)]
    axis.scatter(*_places(done), color=FAINT, label="tried")
    best = frontier(done)
    axis.plot(*_places(best), color=SERIES[0], marker="o", linewidth=1, label="none is better in both")
    label = "recommended" if found.wish.holds(found.candidates[0].answer) else "nearest to the limits"
    axis.scatter(*_places(found.candidates[:1]), color=SERIES[1], marker="*", s=130, zorder=5, label=label)
    for one, hours, cost in zip(best, *_places(best), strict=True):
        axis.annotate(one.hosts, (hours, cost), (6, 5), textcoords="offset points", fontsize="x-small", color=INK)
    explain(figure, axis)
    words = "Mixes of hosts by median time and cost, with few seeds. The line joins those that no other beats in both."
    return Chart("candidates", "Cost against time", words, figure)


def _places(several: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [one.answer.seconds.p50 / HOUR_S for one in several], [one.answer.cost.p50 for one in several]
