"""The report of a study as a value: its content and order, independent of the form of the file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from unisono.adapt.layouts import Layout
from unisono_lab.report.drawing import Chart
from unisono_lab.report.verdict import advice, correctness, explanations, named, threats, verdict
from unisono_lab.study.analysis import PARTS, Analysis, Curve, Row
from unisono_lab.study.estimate import NOTHING, Estimate, Fit, interval, listed, number, percent, shown
from unisono_lab.study.results import Mode

# The tables of a report.


STEP_MODEL, STEP_TIME = "step model", "step time of Pollux"

PLAIN = "plain loop,"
ONE_PLAIN, EQUAL_PLAIN = "× plain loop", "× plain loop, equal threads"

CROWDED = "*"
"""The mark behind numbers of workers that shared cores."""


def speed_table(curves: Sequence[Curve]) -> WrittenTable:
    """Times and throughputs, with the speedups and efficiencies that follow from them."""
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
            ratio = row.over_equal if has_equal else row.over_baseline
            figures = [_field(row.epoch_s), _field(row.samples_per_s), _field(row.speedup)]
            figures += [_field(row.efficiency, "percent"), _field(row.serial_share, "percent"), _field(ratio)]
            rows.append([shown(curve.label), workers, str(len(row.rates)), *figures])
    notes = ["Serial share: Karp-Flatt, (1/S − 1/W) / (1 − 1/W)."]
    if any(curve.plain for curve in curves):
        notes.append(f"{PLAIN} W: the plain loop, one process with the threads of W workers.")
    if any(curve.crowded for curve in curves):
        notes.append(f"{CROWDED} more workers than cores: they took turns, so there is no speedup.")
    return WrittenTable.of(head, rows, 1, " ".join(notes))


def trained_table(analysis: Analysis) -> WrittenTable:
    """Batch, learning rate, memory, and the results of the training."""
    about = ["study", "scaling", "workers"]
    head = [*about, "batch", "learning rate", "peak memory, MiB", "loss", "accuracy", "weights"]
    rows = []
    for row in _rows(analysis):
        digests = {digest[:12] for digest in row.digests}
        weights = listed(sorted(digests)) if len(digests) < 3 else f"{len(digests)} different ones"
        figures = [
            str(row.batch_size or NOTHING),
            NOTHING if row.learning_rate is None else f"{row.learning_rate:g}",
            number(row.peak_memory_mib),
            NOTHING if row.loss is None else f"{row.loss:.4f}",
            NOTHING if row.accuracy is None else f"{row.accuracy:.3f}",
        ]
        rows.append([shown(row.label), row.mode, _workers(row), *figures, weights or NOTHING])
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
    """A row for each parameter; columns that are the same for all of them are filled in the first row alone."""
    name = fit.law.name + (" (better fit)" if fit is curve.best_fit and len(curve.fits) > 1 else "")
    about = [shown(curve.label), curve.mode, name, fit.law.formula]
    last = [percent(fit.misfit), str(fit.figures)]
    for symbol, estimate in fit.parameters.items():
        has_ends = estimate.low is not None and estimate.high is not None
        ends = f"{estimate.low:.4f} … {estimate.high:.4f}" if has_ends else "no interval"
        yield [*about, f"{symbol}, {fit.law.symbols[symbol]}", Field(f"{estimate.value:.4f}", ends), *last]
        about, last = [""] * len(about), [""] * len(last)


def prediction_table(analysis: Analysis) -> WrittenTable:
    """Speedups that the models predict for numbers of workers that were not measured, with throughputs below them."""
    models = list(dict.fromkeys(fit.law.name for curve in analysis.curves for fit in curve.fits))
    head = ["study", "scaling", "workers", *models, STEP_MODEL, STEP_TIME]
    rows = []
    for curve in analysis.curves:
        for workers in curve.predict if curve.fits else ():
            fields = _predictions(analysis, curve, workers)
            figures = (fields.get(name, NOTHING) for name in head[3:])
            rows.append([shown(curve.label), curve.mode, f"{workers} (prediction)", *figures])
    note = (
        f"Speedups; below them samples/s. {STEP_MODEL}: from one worker's measured step, the bytes of the gradients, "
        f"and the measured latency and bandwidth; from nothing overlaps to everything does. {STEP_TIME}: fitted, as "
        f"policies use it; no further than there are shards."
    )
    return WrittenTable.of(head, rows, 3, note)


def _predictions(analysis: Analysis, curve: Curve, workers: int) -> dict[str, Field]:
    fields = {}
    for fit in curve.fits:
        rate = fit.samples_per_s(workers)
        ends = interval(rate)
        below = f"{number(rate.value)}{f' ({ends})' if ends else ''}"
        fields[fit.law.name] = Field(number(fit.speedup(workers)), below)
    alone = curve.usable[0]
    if alone.workers != 1:
        return fields
    rate_alone = alone.samples_per_s.value
    if curve.model is not None:
        ends_of_all = sorted(curve.model.speedup(workers, curve.mode, overlapped=is_all) for is_all in (False, True))
        texts = (" … ".join(number(times * end) for end in ends_of_all) for times in (1, rate_alone))
        fields[STEP_MODEL] = Field(*texts)
    shards = int(analysis.results.figure("shards", curve.label) or 0)
    if curve.step_time is not None and alone.batch_size and workers <= shards:
        batch = alone.batch_size * (workers if curve.mode == "weak" else 1)
        predicted_rate = batch / curve.step_time.seconds(Layout(workers, batch, shards))
        fields[STEP_TIME] = Field(number(predicted_rate / rate_alone), number(predicted_rate))
    return fields


def batch_table(analysis: Analysis) -> WrittenTable:
    """The batches that the search tried."""
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


def _field(estimate: Estimate | None, form: str = "number") -> Field:
    if estimate is None:
        return Field(NOTHING)
    return Field((percent if form == "percent" else number)(estimate.value), interval(estimate, form))


# A table of words and figures, as text.


class Field(NamedTuple):
    """The text of one cell of a table.

    Attributes:
        below: the interval of the figure, shown below it in smaller letters.
    """

    text: str
    below: str = ""


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """Rows of fields.

    Attributes:
        text_columns: the number of columns of words, from the left; the others are figures.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Field]]
    text_columns: int = 0
    note: str = ""

    @classmethod
    def of(
        cls, head: Sequence[str], rows: Sequence[Sequence[Field | str]], text_columns: int = 0, note: str = ""
    ) -> WrittenTable:
        """Make a table; plain strings become fields, and empty columns are left out."""
        all_fields = [[field if isinstance(field, Field) else Field(field) for field in row] for row in rows]
        filled = [
            place for place in range(len(head)) if any(row[place].text not in ("", NOTHING) for row in all_fields)
        ]
        return cls(head, all_fields, text_columns, note).with_columns(filled)

    def with_columns(self, places: Sequence[int]) -> WrittenTable:
        """The table with the columns at these places alone."""
        rows = [[row[place] for place in places] for row in self.rows]
        words = sum(place < self.text_columns for place in places)
        return WrittenTable([self.head[place] for place in places], rows, words, self.note)


def fixed_texts(report: Literal["study", "simulation"]) -> dict[str, Any]:
    """The texts of a kind of report that do not depend on the figures: its terms with their meanings, and more."""
    reports: dict[str, Any] = tomllib.loads(files(__package__).joinpath("words.toml").read_text(encoding="utf-8"))
    return dict(reports[report])


BlockKind = Literal["prose", "bullets", "table", "pictures", "code", "terms"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a section; one of its fields is filled.

    Attributes:
        texts: paragraphs, items, or lines of code.
        pictures: the charts, beside each other where there is room.
        terms: pairs of a word and its meaning.
    """

    kind: BlockKind
    texts: Sequence[str] = ()
    table: WrittenTable | None = None
    pictures: Sequence[Chart] = ()
    terms: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, content: WrittenTable | str | Sequence[Chart]) -> Block:
        """A table, a paragraph, or pictures."""
        if isinstance(content, WrittenTable):
            return cls("table", table=content)
        return cls("prose", [content]) if isinstance(content, str) else cls("pictures", pictures=content)

    @property
    def has_content(self) -> bool:
        """Whether the block has any content."""
        return bool(self.texts or self.pictures or self.terms or (self.table and self.table.rows))


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the report: the blocks below a heading."""

    title: str
    blocks: Sequence[Block]

    @classmethod
    def of(cls, title: str, *contents: WrittenTable | str | Sequence[Chart]) -> Section:
        """A section of tables, paragraphs and pictures."""
        return cls(title, [Block.of(content) for content in contents])


@dataclass(frozen=True, slots=True)
class Document:
    """A report."""

    title: str
    verdict: Sequence[str]
    advice: Sequence[str]
    sections: Sequence[Section]


def document(analysis: Analysis, pictures: Sequence[Chart]) -> Document:
    """The content of a study's report."""
    results = analysis.results
    breakdowns = [chart for chart in pictures if chart.name.startswith("breakdown")]
    trained = [named(analysis, curve, correctness(curve)) for curve in analysis.curves]
    facts = _pairs("machine and software", results.environment), _pairs("setting", results.settings)
    sections = [
        *(_figures(analysis, mode) for mode in analysis.modes),
        *(_plots(mode, pictures) for mode in analysis.modes),
        Section.of("Why it is not linear", *explanations(analysis), breakdowns, part_table(analysis)),
        _steps(pictures),
        _models(analysis),
        _batches(analysis, pictures),
        Section.of("Correctness", *trained, trained_table(analysis)),
        Section.of("Environment and settings", *facts),
        Section("Commands", [Block("code", results.commands)]),
        Section("Threats to validity", [Block("bullets", threats(analysis))]),
        Section("Glossary", [Block("terms", terms=[*fixed_texts("study")["terms"].items()])]),
    ]
    filled = [section for section in sections if any(block.has_content for block in section.blocks)]
    return Document(analysis.settings.title, verdict(analysis), advice(analysis), filled)


def _figures(analysis: Analysis, mode: Mode) -> Section:
    about = {
        "strong": "Strong scaling: the global batch stays, and each worker computes a smaller part of it.",
        "weak": "Weak scaling: each worker keeps its batch, so the global batch, and with it the learning rate, grows "
        "with the workers. Speedups are those of the throughput.",
        "baseline": "",
    }
    words = f"{about[mode]} Medians; below them the 95 % interval (bootstrap over the runs)."
    return Section.of(f"Figures: {mode} scaling", words, speed_table(analysis.of(mode)))


def _plots(mode: Mode, pictures: Sequence[Chart]) -> Section:
    chosen = [chart for chart in pictures if chart.name.endswith(mode) and not chart.name.startswith("breakdown")]
    return Section.of(f"Plots: {mode} scaling", chosen)


def _steps(pictures: Sequence[Chart]) -> Section:
    chosen = [chart for chart in pictures if chart.name.startswith("step-")]
    about = (
        "The activities of each worker in the median step of one run. The black line is the critical path: parts that "
        "waited for each other. unisono timeline shows all steps of a run, whose folder is in the study's cells."
    )
    words = [f"{chart.title}: {chart.words}" for chart in chosen]
    blocks = [Block.of(about), Block.of(chosen), *map(Block.of, words)]
    return Section("One step, worker by worker", blocks if chosen else [])


def _models(analysis: Analysis) -> Section:
    fits, predictions = fit_table(analysis), prediction_table(analysis)
    if not fits.rows:
        return Section.of("Models and predictions", predictions)
    about = (
        "Fitted to each run by least squares of the logarithms, with the throughput of one worker as an unknown of its "
        "own; intervals from the covariance and Student's t. The better fit is the one with the lower BIC."
    )
    guesses = (
        "Predictions, not measurements: what the models expect of numbers of workers that were not tried, had there "
        "been processors enough."
    )
    return Section.of("Models and predictions", about, fits, guesses, predictions)


def _batches(analysis: Analysis, pictures: Sequence[Chart]) -> Section:
    sentences = []
    for label, curve in analysis.batches.items():
        name = f"{shown(label)}: " if label else ""
        best = "" if curve.best in (None, curve.largest) else f"; throughput is best with {curve.best}"
        if curve.largest is None:
            sentences.append(f"{name}no batch that was tried fits into memory.")
        else:
            sentences.append(f"{name}the largest batch that fits has {curve.largest} samples per worker{best}.")
    chosen = [chart for chart in pictures if chart.name == "batch-size"]
    return Section.of("Batch size", *sentences, chosen, batch_table(analysis))


def _pairs(head: str, about: Mapping[str, Any]) -> WrittenTable:
    rows = [[name, _text(value)] for name, value in about.items() if value not in (None, "", [], {})]
    return WrittenTable.of([head, ""], rows, text_columns=2)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
