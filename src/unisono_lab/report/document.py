"""The report of a study as a value: what it says and in which order, whatever it is written into."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from unisono.adapt.layout_trials import Layout
from unisono_lab.analysis.analysis import PARTS, Analysis, Curve, Row
from unisono_lab.analysis.estimate import NOTHING, Estimate, interval, listed, number, percent, shown
from unisono_lab.analysis.laws import Fit
from unisono_lab.analysis.results import Mode
from unisono_lab.report.drawing import Chart
from unisono_lab.report.verdict import advice, correctness, explanations, named, threats, verdict

# The tables of a report.


STEP_MODEL, STEP_TIME = "step model", "step time of Pollux"

PLAIN = "plain loop,"
ONE_PLAIN, EQUAL_PLAIN = "× plain loop", "× plain loop, equal threads"

CROWDED = "*"
"""Behind numbers of workers that shared cores."""


def speed_table(curves: Sequence[Curve]) -> WrittenTable:
    """Times, throughputs and what follows from them."""
    has_equal = any(row.over_equal for curve in curves for row in curve.rows if row.workers > 1)
    over_plain = EQUAL_PLAIN if has_equal else ONE_PLAIN
    head = ["study", "workers", "runs", "epoch, s", "samples/s", "speedup", "efficiency", "serial share", over_plain]
    rows: list[list[Field | str]] = []
    for curve in curves:
        named = [(_workers(row), row) for row in curve.rows]
        named += [
            (f"{PLAIN} {row.workers}", row) for row in curve.plain
        ]  # one process, with threads as so many workers
        for workers, row in named:
            over = row.over_equal if has_equal else row.over_baseline
            figures = [_field(row.epoch_s), _field(row.samples_per_s), _field(row.speedup)]
            figures += [_share(row.efficiency), _share(row.serial_share), _field(over)]
            rows.append([shown(curve.label), workers, str(len(row.rates)), *figures])
    notes = ["Serial share: Karp-Flatt, (1/S − 1/W) / (1 − 1/W)."]
    if any(curve.plain for curve in curves):
        notes.append(f"{PLAIN} W: the plain loop, one process with the threads of W workers.")
    if any(curve.crowded for curve in curves):
        notes.append(f"{CROWDED} more workers than cores: they took turns, so there is no speedup to speak of.")
    return WrittenTable.of(head, rows, 1, " ".join(notes))


def trained_table(analysis: Analysis) -> WrittenTable:
    """What was trained, and what came of it."""
    about = ["study", "scaling", "workers"]
    head = [*about, "batch", "learning rate", "peak memory, MiB", "loss", "accuracy", "weights"]
    rows = []
    for row in _rows(analysis):
        digests = {digest[:12] for digest in row.digests}
        said = listed(sorted(digests)) if len(digests) < 3 else f"{len(digests)} different ones"
        figures = [
            str(row.batch_size or NOTHING),
            NOTHING if row.learning_rate is None else f"{row.learning_rate:g}",
            number(row.peak_memory_mib),
            NOTHING if row.loss is None else f"{row.loss:.4f}",
            NOTHING if row.accuracy is None else f"{row.accuracy:.3f}",
        ]
        rows.append([shown(row.label), row.mode, _workers(row), *figures, said or NOTHING])
    table = WrittenTable.of(head, rows, 2)
    return table if set(table.head) - set(about) else WrittenTable(head, [])


def part_table(analysis: Analysis) -> WrittenTable:
    """Milliseconds of each part of a step."""
    head = ["study", "scaling", "workers", "step, ms", *(f"{name}, ms" for name in PARTS.values())]
    rows = []
    for row in _rows(analysis):
        if parts := row.parts:
            figures = [row.step_s, *(parts.get(part) for part in PARTS)]
            written = [NOTHING if seconds is None else number(1000 * seconds) for seconds in figures]
            rows.append([shown(row.label), row.mode, _workers(row), *written])
    return WrittenTable.of(head, rows, 2)


def fit_table(analysis: Analysis) -> WrittenTable:
    """The laws with their parameters."""
    head = ["study", "scaling", "law", "formula", "parameter", "value", "largest misfit", "runs"]
    rows = [row for curve in analysis.curves for fit in curve.fits for row in _fit_rows(curve, fit)]
    sources = {fit.law.name: fit.law.source for curve in analysis.curves for fit in curve.fits}
    note = "; ".join(f"{name}: {source}" for name, source in sources.items())
    return WrittenTable.of(head, rows, 5, f"Sources: {note}." if note else "")


def _fit_rows(curve: Curve, fit: Fit) -> Iterator[list[Field | str]]:
    """A row for each parameter; what holds for all of them stands in the first."""
    name = fit.law.name + (" (better fit)" if fit is curve.best_fit and len(curve.fits) > 1 else "")
    about = [shown(curve.label), curve.mode, name, fit.law.formula]
    last = [percent(fit.misfit), str(fit.figures)]
    for symbol, estimate in fit.parameters.items():
        yield [*about, f"{symbol}, {fit.law.symbols[symbol]}", Field(_small(estimate.value), _ends(estimate)), *last]
        about, last = [""] * len(about), [""] * len(last)


def prediction_table(analysis: Analysis) -> WrittenTable:
    """Speedups that the models expect of numbers of workers that were not measured, and throughputs below them."""
    models = list(dict.fromkeys(fit.law.name for curve in analysis.curves for fit in curve.fits))
    head = ["study", "scaling", "workers", *models, STEP_MODEL, STEP_TIME]
    rows = []
    for curve in analysis.curves:
        for workers in curve.predict if curve.fits else ():
            found = _predictions(analysis, curve, workers)
            figures = (found.get(name, NOTHING) for name in head[3:])
            rows.append([shown(curve.label), curve.mode, f"{workers} (prediction)", *figures])
    note = (
        f"Speedups; below them samples/s. {STEP_MODEL}: from one worker's measured step, the bytes of the gradients, "
        f"and the measured latency and bandwidth; from nothing overlaps to everything does. {STEP_TIME}: fitted, as "
        f"policies use it; no further than there are shards."
    )
    return WrittenTable.of(head, rows, 3, note)


def _predictions(analysis: Analysis, curve: Curve, workers: int) -> dict[str, Field]:
    found = {fit.law.name: _predicted(fit, workers) for fit in curve.fits}
    alone = curve.usable[0]
    if alone.workers != 1:
        return found
    rate = alone.samples_per_s.value
    if curve.model is not None:
        ends = [curve.model.speedup(workers, curve.mode, overlapped=overlapped) for overlapped in (False, True)]
        found[STEP_MODEL] = Field(_range(ends), _range([rate * end for end in ends]))
    shards = int(analysis.results.figure("shards", curve.label) or 0)
    if curve.step_time is not None and alone.batch_size and workers <= shards:
        batch = alone.batch_size * (workers if curve.mode == "weak" else 1)
        then = batch / curve.step_time.seconds(Layout(workers, batch, shards))
        found[STEP_TIME] = Field(number(then / rate), number(then))
    return found


def _predicted(fit: Fit, workers: int) -> Field:
    rate = fit.samples_per_s(workers)
    ends = interval(rate)
    return Field(number(fit.speedup(workers)), f"{number(rate.value)}{f' ({ends})' if ends else ''}")


def batch_table(analysis: Analysis) -> WrittenTable:
    """Batches that were tried."""
    head = ["study", "batch per worker", "samples/s", "peak memory, MiB", "fits"]
    rows = [
        [shown(label), str(row.batch), number(row.samples_per_s), number(row.peak_mib), "yes" if row.fits else "no"]
        for label, curve in analysis.batches.items()
        for row in sorted(curve.rows, key=lambda row: row.batch)
    ]
    return WrittenTable.of(head, rows, 1)


def _rows(analysis: Analysis) -> Iterator[Row]:
    return (row for curve in analysis.curves for row in curve.rows)


def _workers(row: Row) -> str:
    return f"{row.workers}{CROWDED if row.oversubscribed else ''}"


def _field(estimate: Estimate | None) -> Field:
    return Field(NOTHING) if estimate is None else Field(number(estimate.value), interval(estimate))


def _share(estimate: Estimate | None) -> Field:
    return Field(NOTHING) if estimate is None else Field(percent(estimate.value), interval(estimate, "percent"))


def _small(value: float) -> str:
    """Of a parameter, of which 0.0004 may be a lot."""
    return f"{value:.4f}"


def _ends(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "no interval"
    return f"{_small(estimate.low)} … {_small(estimate.high)}"


def _range(ends: Sequence[float]) -> str:
    return f"{number(min(ends))} … {number(max(ends))}"


# A table of words and figures, as a reader sees it.


class Field(NamedTuple):
    """The text of one cell of a table.

    Attributes:
        text: the figure.
        below: its interval, in smaller letters.
    """

    text: str
    below: str = ""


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """Rows of fields.

    Attributes:
        head: the head of each column.
        rows: the rows, with one field for each column.
        text_columns: the number of columns of words, from the left; the others are figures.
        note: the text below the table.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Field]]
    text_columns: int = 0
    note: str = ""

    @classmethod
    def of(
        cls, head: Sequence[str], rows: Sequence[Sequence[Field | str]], text_columns: int = 0, note: str = ""
    ) -> WrittenTable:
        """A table in which a field without an interval is its text alone, without columns in which nothing stands."""
        whole = [[field if isinstance(field, Field) else Field(field) for field in row] for row in rows]
        kept = [place for place in range(len(head)) if any(row[place].text not in ("", NOTHING) for row in whole)]
        return cls(head, whole, text_columns, note).with_columns(kept)

    def with_columns(self, places: Sequence[int]) -> WrittenTable:
        """Some of its columns."""
        rows = [[row[place] for place in places] for row in self.rows]
        words = sum(place < self.text_columns for place in places)
        return WrittenTable([self.head[place] for place in places], rows, words, self.note)


# The report of a study as a value: what it says and in which order, whatever it is written into.


def fixed_words(report: Literal["study", "simulation"]) -> dict[str, Any]:
    """What a kind of report says whatever the figures are: its terms, each with what it means, and more."""
    found: dict[str, Any] = tomllib.loads(files(__package__).joinpath("words.toml").read_text(encoding="utf-8"))
    return dict(found[report])


BlockKind = Literal["prose", "bullets", "table", "pictures", "code", "terms"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a section; one of its fields is filled.

    Attributes:
        kind: the kind of block.
        texts: paragraphs, items, or lines of code.
        table: the table, if this is one.
        pictures: the charts, beside each other where there is room.
        terms: words, each with what it means.
    """

    kind: BlockKind
    texts: Sequence[str] = ()
    table: WrittenTable | None = None
    pictures: Sequence[Chart] = ()
    terms: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the report: the blocks below a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Document:
    """A report.

    Attributes:
        title: the document's title.
        verdict: sentences that come first.
        advice: the recommendation.
        sections: all else.
    """

    title: str
    verdict: Sequence[str]
    advice: Sequence[str]
    sections: Sequence[Section]


def document(analysis: Analysis, pictures: Sequence[Chart]) -> Document:
    """What the report of a study says."""
    results = analysis.results
    breakdowns = [chart for chart in pictures if chart.name.startswith("breakdown")]
    reasons = _prose(*explanations(analysis))
    trained = _prose(*(named(analysis, curve, correctness(curve)) for curve in analysis.curves))
    facts = [_table(_pairs("machine and software", results.environment)), _table(_pairs("setting", results.settings))]
    sections = [
        *(_figures(analysis, mode) for mode in analysis.modes),
        *(_plots(mode, pictures) for mode in analysis.modes),
        Section("Why it is not linear", [reasons, _pictures(breakdowns), _table(part_table(analysis))]),
        _steps(pictures),
        _models(analysis),
        _batches(analysis, pictures),
        Section("Correctness", [trained, _table(trained_table(analysis))]),
        Section("Environment and settings", facts),
        Section("Commands", [Block("code", results.commands)]),
        Section("Threats to validity", [Block("bullets", threats(analysis))]),
        Section("Glossary", [Block("terms", terms=[*fixed_words("study")["terms"].items()])]),
    ]
    kept = [section for section in sections if any(_says_something(block) for block in section.blocks)]
    return Document(analysis.wanted.title, verdict(analysis), advice(analysis), kept)


def _says_something(block: Block) -> bool:
    return bool(block.texts or block.pictures or block.terms or (block.table and block.table.rows))


def _prose(*texts: str) -> Block:
    return Block("prose", texts)


def _table(table: WrittenTable) -> Block:
    return Block("table", table=table)


def _pictures(chosen: Sequence[Chart]) -> Block:
    return Block("pictures", pictures=chosen)


def _figures(analysis: Analysis, mode: Mode) -> Section:
    about = {
        "strong": "Strong scaling: the global batch stays, and each worker computes a smaller part of it.",
        "weak": "Weak scaling: each worker keeps its batch, so the global batch, and with it the learning rate, grows "
        "with the workers. Speedups are those of the throughput.",
        "baseline": "",
    }
    words = f"{about[mode]} Medians; below them the 95 % interval (bootstrap over the runs)."
    return Section(f"Figures: {mode} scaling", [_prose(words), _table(speed_table(analysis.of(mode)))])


def _plots(mode: Mode, pictures: Sequence[Chart]) -> Section:
    chosen = [chart for chart in pictures if chart.name.endswith(mode) and not chart.name.startswith("breakdown")]
    return Section(f"Plots: {mode} scaling", [_pictures(chosen)])


def _steps(pictures: Sequence[Chart]) -> Section:
    chosen = [chart for chart in pictures if chart.name.startswith("step-")]
    about = [
        "What each worker did when, in the median step of one run. The black line is the critical path: what had to "
        "wait for what before it. unisono timeline shows all steps of a run, whose folder is in the study's cells."
    ]
    said = [f"{chart.title}: {chart.words}" for chart in chosen]
    blocks = [_prose(*about if chosen else []), _pictures(chosen), _prose(*said)]
    return Section("One step, worker by worker", blocks)


def _models(analysis: Analysis) -> Section:
    fits = fit_table(analysis)
    about = (
        "Fitted to each run by least squares of the logarithms, with the throughput of one worker as an unknown of its "
        "own; intervals from the covariance and Student's t. The better fit is the one with the lower BIC."
    )
    guesses = (
        "Predictions, not measurements: what the models expect of numbers of workers that were not tried, had there "
        "been processors enough."
    )
    said = [_prose(words) if fits.rows else _prose() for words in (about, guesses)]
    blocks = [said[0], _table(fits), said[1], _table(prediction_table(analysis))]
    return Section("Models and predictions", blocks)


def _batches(analysis: Analysis, pictures: Sequence[Chart]) -> Section:
    said = []
    for label, curve in analysis.batches.items():
        name = f"{shown(label)}: " if label else ""
        best = "" if curve.best in (None, curve.largest) else f"; throughput is best with {curve.best}"
        if curve.largest is None:
            said.append(f"{name}no batch that was tried fits into memory.")
        else:
            said.append(f"{name}the largest batch that fits has {curve.largest} samples per worker{best}.")
    chosen = [chart for chart in pictures if chart.name == "batch-size"]
    return Section("Batch size", [_prose(*said), _pictures(chosen), _table(batch_table(analysis))])


def _pairs(head: str, about: Mapping[str, Any]) -> WrittenTable:
    rows = [[name, _said(value)] for name, value in about.items() if value not in (None, "", [], {})]
    return WrittenTable.of([head, ""], rows, text_columns=2)


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_said(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
