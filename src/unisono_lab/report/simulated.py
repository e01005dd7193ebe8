"""The report of a simulation as a document."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unisono_lab.analysis.estimate import NOTHING, counted, duration, number, percent
from unisono_lab.report.charts import Chart
from unisono_lab.report.document import Block, Document, Section
from unisono_lab.report.written_table import Field, WrittenTable
from unisono_lab.simulation.search import Candidate, Expectation, Goal, Likelihood, Margin, enough, margins
from unisono_lab.simulation.simulation import Simulation, commands, left_out

ASSUMED: tuple[str, ...] = (
    "Decisions about membership are those of the real coordinator's state machine, and decisions about batches, sizes "
    "and checkpoints those of the real policies; hosts, processes, networks and steps are simulated.",
    "A step takes what the fitted model says, times a log-normal factor of each worker; the slowest counts.",
    "A host that is taken away without a notice falls silent; the coordinator gives its workers up as it does in a "
    "job, by --failure-timeout-s.",
    "The coordinator's own host is not lost.",
    "Each host is paid from the moment at which it is there until it is taken away or the job is done, also while its "
    "workers start, wait, or are not wanted by a policy.",
    "A job that all have left is started again as soon as there is room, from its newest checkpoint.",
    "What policies do to strategies, topologies and the learning rate changes no time.",
)

TERMS: tuple[tuple[str, str], ...] = (
    ("p50, p95", "The median over all seeds, and what 95 % of them do not exceed."),
    ("seed", "One course of events: when hosts go and come, and how long each step takes."),
    ("in time", "The share of the seeds done by the deadline; in brackets its 95 % interval (Wilson, JASA 1927)."),
    ("in budget", "The share of the seeds that are done and cost no more than the budget, with its interval."),
    ("regroup", "A generation ends or forms; losses that nobody has noticed yet are a part of it."),
    ("repeated", "Steps that were computed again, since nobody was left who had their result, and broken-off steps."),
    ("waiting", "Too few workers, or a job that all had left."),
)


def simulated_document(found: Simulation, pictures: Sequence[Chart], title: str) -> Document:
    """What the report of a simulation says."""
    sections = [
        Section("Figures: time and cost", [Block("table", table=_answers(found))]),
        Section("Figures: where the time goes", [Block("table", table=_lost(found))]),
        *_candidates(found),
        Section("Plots", [Block("pictures", pictures=pictures)]),
        Section("Figures: workers", [Block("table", table=_rates(found))]),
        Section("What the figures are from", [Block("table", table=_sources(found))]),
        *_guesses(found),
        Section("What is assumed", [Block("bullets", ASSUMED)]),
        Section("Glossary", [Block("terms", terms=TERMS)]),
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
    rows = [[Field(one.name), *_fields(one.answer, found.wish)] for one in found.variants]
    return WrittenTable(["policies", *_head(found.wish)], rows, text_columns=1)


def _head(wish: Goal) -> list[str]:
    """Of the columns of :func:`_fields`."""
    limits = [name for name, limit in (("in time", wish.deadline_s), ("in budget", wish.budget)) if limit is not None]
    return ["time p50", "time p95", "cost p50", "cost p95", *limits, "workers lost"]


def _fields(one: Expectation, wish: Goal) -> list[Field]:
    chances = (one.in_time if wish.deadline_s is not None else None, one.in_budget)
    return [
        *_row(_long(one.seconds.p50), _long(one.seconds.p95), number(one.cost.p50), number(one.cost.p95)),
        *(Field(percent(each.share), f"{percent(each.low)} … {percent(each.high)}") for each in chances if each),
        Field(number(one.losses)),
    ]


def _lost(found: Simulation) -> WrittenTable:
    parts = list(found.variants[0].answer.lost)
    rows = [_row(one.name, *(_long(one.answer.lost[part]) for part in parts)) for one in found.variants]
    return WrittenTable(["policies", *parts], rows, text_columns=1, note="Means over all seeds.")


def _candidates(found: Simulation) -> list[Section]:
    if not found.candidates:
        return []
    rows = [
        [*_row(one.hosts, one.policies, one.scenario.job.checkpoint_every or "none"), *_fields(one.answer, found.wish)]
        for one in found.candidates
    ]
    table = WrittenTable(["hosts", "policies", "checkpoint every", *_head(found.wish)], rows, text_columns=2)
    best = commands(found.candidates[0].scenario)
    said = [line for one in best for line in (f"# on {one.hosts}", one.words)]
    return [Section("Figures: the best candidates", [Block("table", table=table), Block("code", said)])]


def _rates(found: Simulation) -> WrittenTable:
    first = found.rates[0].samples_per_s
    rows = [
        _row(
            rate.workers,
            number(rate.samples_per_s),
            number(rate.samples_per_s / first),
            "extrapolated" if rate.extrapolated else "measured",
        )
        for rate in found.rates
    ]
    return WrittenTable(["workers", "samples/s", "speedup", "from"], rows)


def _sources(found: Simulation) -> WrittenTable:
    sources = found.scenario.sources
    rows = [_row(name, sources.get(name, "default"), number(value)) for name, value in found.scenario.figures().items()]
    return WrittenTable(
        ["figure", "from", "value"], rows, text_columns=2, note="Seconds, but for gamma, jitter, and shares."
    )


def _guesses(found: Simulation) -> list[Section]:
    rows = [
        _row(one.name, f"{number(one.value)} × {number(one.factor)}", _change(one.seconds), _change(one.cost))
        for one in found.guesses
    ]
    if not rows:
        return []
    note = "Figures that nobody measured, at half and at double their values; those that matter by 0.5 % or more."
    table = WrittenTable(["figure", "value", "time", "cost"], rows, text_columns=2, note=note)
    return [Section("Figures: what guesses matter", [Block("table", table=table)])]


def _row(*values: object) -> list[Field]:
    return [Field(str(value)) for value in values]


def _change(factor: float) -> str:
    return f"{100 * (factor - 1):+.1f} %"


def _likely(one: Likelihood) -> str:
    return f"{percent(one.share)} ({percent(one.low)} … {percent(one.high)})"


def _long(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else NOTHING
