"""The report of a study as a value: what it says and in which order, whatever it is written into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unisono_lab.analysis.analysis import Analysis
from unisono_lab.analysis.estimate import shown
from unisono_lab.analysis.results import Mode
from unisono_lab.report.drawing import Chart
from unisono_lab.report.figure_tables import (
    WrittenTable,
    batch_table,
    fit_table,
    part_table,
    prediction_table,
    speed_table,
    trained_table,
)
from unisono_lab.report.verdict import advice, correctness, explanations, named, overheads, threats, verdict

# Words that a report uses, for who reads one for the first time.

TERMS: tuple[tuple[str, str], ...] = (
    ("worker", "A process that trains on one device, together with others; W is their number."),
    ("epoch", "One pass over the data set. The first one is left out, for it starts things and fills caches."),
    ("step", "One update of the weights, from one global batch."),
    ("throughput", "Samples that are trained on per second: samples / time."),
    ("speedup", "S(W) = T(1) / T(W): how many times as fast W workers train as one does. Ideal is W."),
    ("efficiency", "S(W) / W: what share of W workers' time is worth something. Ideal is 100 %."),
    ("strong scaling", "More workers share the same global batch: the same training, sooner."),
    (
        "weak scaling",
        "Each worker keeps its batch, so the global batch grows with the workers, and the learning rate with it. That "
        "is another training: its loss need not be the same.",
    ),
    ("baseline", "The plain single-process loop, without anything for several workers."),
    ("median", "Half of the measurements are larger and half are smaller; a single bad one hardly moves it."),
    (
        "95 % interval",
        "Where the figure would be in 95 of 100 such studies. Of medians by bootstrap: the measurements are drawn "
        "again and again from themselves (Hoefler and Belli, SC 2015).",
    ),
    (
        "serial share",
        "After Karp and Flatt: (1/S − 1/W) / (1 − 1/W), what share of the work behaves as if only one worker could do "
        "it. If it grows with W, overhead grows; if it stays, that part of the work is serial.",
    ),
    ("Amdahl's law", "S(W) = 1 / (s + (1 − s)/W): a share s of the work stays serial, so S never exceeds 1/s."),
    ("Gustafson's law", "S(W) = W − s(W − 1): the work grows with the workers, and a share s of the time is serial."),
    (
        "universal scalability law",
        "S(W) = W / (1 + σ(W − 1) + κW(W − 1)): σ is waiting for what is shared, κ is what each worker costs each "
        "other one. With κ above 0 there is a number of workers beyond which more are slower.",
    ),
    ("exposed communication", "The part of the exchange of gradients that no computation hides."),
    ("waiting for the slowest", "All must have their gradients before anybody goes on: the others wait."),
    (
        "critical path",
        "Of a step: the work and the transfers of which each had to wait for the one before. Only what is on it, made "
        "shorter, makes the step shorter.",
    ),
    ("digest", "SHA-256 of all weights: the same digest means the same bits."),
    ("oversubscription", "More workers than cores: they take turns, and adding one cannot make anything faster."),
    ("data parallel", "Each worker has the whole model and a part of each batch. Model parallel: a part of the model."),
    ("mirrored variables", "The same weights on each worker, kept alike by adding up the gradients in every step."),
)


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
    reasons = _prose(*explanations(analysis), *overheads(analysis))
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
        Section("Glossary", [Block("terms", terms=TERMS)]),
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
