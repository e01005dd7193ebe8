"""The report of a simulation as a document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from unisono_lab.report.document import Block, Document, Field, Section, WrittenTable, fixed_texts
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
from unisono_lab.study.estimate import NOTHING, counted, duration, number, percent


def simulated_document(result: Simulation, pictures: Sequence[Chart], title: str) -> Document:
    """The content of a simulation's report."""
    words = fixed_texts("simulation")
    sections = [
        Section.of("Figures: time and cost", _answers(result)),
        Section.of("Figures: where the time goes", _lost(result)),
        *_candidates(result),
        Section.of("Plots", pictures),
        Section.of("Figures: workers", _rates(result)),
        Section.of("What the figures are from", _sources(result)),
        *_guesses(result),
        Section("What is assumed", [Block("bullets", words["assumed"])]),
        Section("Glossary", [Block("terms", terms=[*words["terms"].items()])]),
    ]
    return Document(title, _verdict(result), _advice(result), sections)


def _verdict(result: Simulation) -> list[str]:
    answer = result.variants[0].answer
    sentences = [
        f"The job takes {_long(answer.seconds.p50)} in the median, and {_long(answer.seconds.p95)} at most in 95 % of "
        f"{answer.seeds} seeds; it costs {number(answer.cost.p50)}, and {number(answer.cost.p95)} at most."
    ]
    if result.goal.deadline_s is not None:
        sentences.append(
            f"It is done within {_long(result.goal.deadline_s)} with a probability of {_likely(answer.in_time)}."
        )
    elif answer.in_time.share < 1:
        sentences.append(
            f"It is done with a probability of {_likely(answer.in_time)}: a job that is not done counts as endless."
        )
    if answer.in_budget is not None:
        sentences.append(
            f"It costs {number(result.goal.budget)} at most with a probability of {_likely(answer.in_budget)}."
        )
    if result.is_extrapolation:
        measured = result.scenario.measured_to
        measured_words = (
            f"no more than {counted(measured, 'worker')} were measured" if measured else "nothing was measured"
        )
        sentences.append(
            f"This is an extrapolation: {measured_words}, and the job has room for {result.scenario.room}."
        )
    return sentences


def _advice(result: Simulation) -> list[str]:
    limit = enough(result.rates)
    more = [rate.workers for rate in result.rates if rate.workers > limit]
    fewer = [rate.workers for rate in result.rates if rate.workers < limit]
    sentences = []
    if more:
        sentences = [
            f"More than {counted(limit, 'worker')} no longer pay: {more[0]} are faster by less than 10 %, or slower."
        ]
    elif fewer:
        sentences = [f"All {counted(limit, 'worker')} pay: they are faster than {fewer[-1]} by 10 % or more."]
    if not result.candidates:
        return sentences
    best = result.candidates[0]
    if not result.goal.holds(best.answer):
        return [*sentences, f"No candidate is within the limits. The nearest one has {best.hosts}."]
    run = [f"On {command.hosts}: {command.words}" for command in commands(best.scenario)]
    alternatives = [_margin(margin, result.goal) for margin in margins(result.candidates, result.goal)]
    return [*sentences, f"Recommended: {_way(best)}.", *run, *left_out(best.scenario), *alternatives]


def _way(candidate: Candidate) -> str:
    return f"{candidate.hosts}, checkpoints {candidate.checkpoints}, policies {candidate.policies}"


def _margin(margin: Margin, goal: Goal) -> str:
    """A sentence about the next best candidate, and how much more it takes or costs."""
    subject = "The next best with other hosts" if margin.has_other_hosts else "The next best with the same hosts"
    more, less = ("more expensive", "cheaper") if goal.aim == "cost" else ("slower", "faster")
    difference = (
        f"is {percent(abs(margin.share))} {more if margin.share > 0 else less}"
        if abs(margin.share) >= 0.001
        else "is as good"
    )
    limits = "" if margin.holds else ", and is not within the limits"
    return f"{subject} ({_way(margin.next)}) {difference} in the median{limits}."


def _answers(result: Simulation) -> WrittenTable:
    rows = [[variant.name, *_fields(variant.answer, result.goal)] for variant in result.variants]
    return WrittenTable.of(["policies", *_head(result.goal)], rows, text_columns=1)


def _head(goal: Goal) -> list[str]:
    limits = [name for name, limit in (("in time", goal.deadline_s), ("in budget", goal.budget)) if limit is not None]
    return ["time p50", "time p95", "cost p50", "cost p95", *limits, "workers lost"]


def _fields(answer: Expectation, goal: Goal) -> list[Field | str]:
    chances = (answer.in_time if goal.deadline_s is not None else None, answer.in_budget)
    spread = [_long(answer.seconds.p50), _long(answer.seconds.p95), number(answer.cost.p50), number(answer.cost.p95)]
    likelihoods = [
        Field(percent(chance.share), f"{percent(chance.low)} … {percent(chance.high)}") for chance in chances if chance
    ]
    return [*spread, *likelihoods, number(answer.losses)]


def _lost(result: Simulation) -> WrittenTable:
    parts = list(result.variants[0].answer.lost)
    rows = [[variant.name, *(_long(variant.answer.lost[part]) for part in parts)] for variant in result.variants]
    return WrittenTable.of(["policies", *parts], rows, text_columns=1, note="Means over all seeds.")


def _candidates(result: Simulation) -> list[Section]:
    if not result.candidates:
        return []
    rows = [
        [way.hosts, way.policies, str(way.scenario.job.checkpoint_every or "none"), *_fields(way.answer, result.goal)]
        for way in result.candidates
    ]
    table = WrittenTable.of(["hosts", "policies", "checkpoint every", *_head(result.goal)], rows, text_columns=2)
    best = commands(result.candidates[0].scenario)
    lines = [line for command in best for line in (f"# on {command.hosts}", command.words)]
    return [Section("Figures: the best candidates", [Block.of(table), Block("code", lines)])]


def _rates(result: Simulation) -> WrittenTable:
    first = result.rates[0].samples_per_s
    rows = []
    for rate in result.rates:
        figures = number(rate.samples_per_s), number(rate.samples_per_s / first)
        rows.append([str(rate.workers), *figures, "extrapolated" if rate.extrapolated else "measured"])
    return WrittenTable.of(["workers", "samples/s", "speedup", "from"], rows)


def _sources(result: Simulation) -> WrittenTable:
    sources = result.scenario.sources
    rows = [[name, sources.get(name, "default"), number(value)] for name, value in result.scenario.figures().items()]
    note = "Seconds, but for gamma, jitter, and shares."
    return WrittenTable.of(["figure", "from", "value"], rows, text_columns=2, note=note)


def _guesses(result: Simulation) -> list[Section]:
    if not result.guesses:
        return []
    rows = []
    for guess in result.guesses:
        changes = [f"{100 * (factor - 1):+.1f} %" for factor in (guess.seconds, guess.cost)]
        rows.append([guess.name, f"{number(guess.value)} × {number(guess.factor)}", *changes])
    note = "Figures that were not measured, at half and at double their values; those with an effect of 0.5 % or more."
    table = WrittenTable.of(["figure", "value", "time", "cost"], rows, text_columns=2, note=note)
    return [Section.of("Figures: effects of guesses", table)]


def _likely(likelihood: Likelihood) -> str:
    return f"{percent(likelihood.share)} ({percent(likelihood.low)} … {percent(likelihood.high)})"


def _long(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else NOTHING


# The pictures of a result.

HOUR_S = 3600.0


def simulated_charts(result: Simulation) -> list[Chart]:
    """Time and cost of all seeds, a job over time, throughputs, and the candidates if there are any."""
    note = f" An {_beyond(result)}." if result.is_extrapolation else ""
    charts = [_spread(result), _course(result), _throughputs(result)]
    charts += [_frontier(result)] if result.candidates else []
    for chart in charts if note else ():
        chart.figure.supxlabel(_beyond(result), x=0.995, ha="right", fontsize="x-small", color=SERIES[1])
    return [replace(chart, words=chart.words + note) for chart in charts]


def _beyond(result: Simulation) -> str:
    most = result.scenario.measured_to
    return f"extrapolation beyond {most} workers" if most else "extrapolation: nothing was measured"


def _spread(result: Simulation) -> Chart:
    figure, axis = canvas("hours", "cost")
    for place, variant in enumerate(result.variants):
        done = [outcome for outcome in variant.outcomes if outcome.done]
        points = ([outcome.seconds / HOUR_S for outcome in done], [outcome.cost for outcome in done])
        axis.scatter(*points, label=variant.name, alpha=0.75, **mark(place))
    if result.goal.deadline_s is not None:
        axis.axvline(result.goal.deadline_s / HOUR_S, color=INK, linestyle=":", label="deadline")
    if result.goal.budget is not None:
        axis.axhline(result.goal.budget, color=INK, linestyle="--", label="budget")
    explain(figure, axis)
    words = "Each mark is a seed: the hours until the job was done, and what all hosts cost until then."
    return Chart("time-and-cost", "Time and cost", words, figure)


def _course(result: Simulation) -> Chart:
    """Workers and price over time, for the seed with the median time."""
    outcome = _middle(result)
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


def _middle(result: Simulation) -> SimulatedOutcome:
    ordered = sorted(result.variants[0].outcomes, key=lambda outcome: outcome.seconds if outcome.done else math.inf)
    return ordered[(len(ordered) - 1) // 2]


def _throughputs(result: Simulation) -> Chart:
    figure, axis = canvas("workers", "samples / s")
    workers = [rate.workers for rate in result.rates]
    doubling(axis, "x")
    axis.plot(workers, [rate.samples_per_s for rate in result.rates], marker="o", color=SERIES[0], label="predicted")
    first = result.rates[0].samples_per_s
    axis.plot(workers, [first * size for size in workers], color=INK, linestyle=":", linewidth=1, label="ideal")
    measured_to = result.scenario.measured_to
    if result.is_extrapolation and measured_to:
        axis.axvspan(measured_to, workers[-1], color=FAINT, alpha=0.5, label="not measured")
    from_zero(axis)
    explain(figure, axis)
    words = (
        "Samples per second of so many workers when nothing goes wrong, by the fitted time of a step with its jitter."
    )
    return Chart("rates", "Throughput by workers", words, figure)


def _frontier(result: Simulation) -> Chart:
    figure, axis = canvas("hours, median", "cost, median")
    done = [candidate for candidate in result.tried if math.isfinite(candidate.answer.seconds.p50)]
    axis.scatter(*_places(done), color=FAINT, label="tried")
    best = frontier(done)
    axis.plot(*_places(best), color=SERIES[0], marker="o", linewidth=1, label="none is better in both")
    label = "recommended" if result.goal.holds(result.candidates[0].answer) else "nearest to the limits"
    axis.scatter(*_places(result.candidates[:1]), color=SERIES[1], marker="*", s=130, zorder=5, label=label)
    for candidate, hours, cost in zip(best, *_places(best), strict=True):
        axis.annotate(candidate.hosts, (hours, cost), (6, 5), textcoords="offset points", fontsize="x-small", color=INK)
    explain(figure, axis)
    words = "Mixes of hosts by median time and cost, with few seeds. The line joins those that none beats in both."
    return Chart("candidates", "Cost against time", words, figure)


def _places(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [candidate.answer.seconds.p50 / HOUR_S for candidate in candidates], [
        candidate.answer.cost.p50 for candidate in candidates
    ]
