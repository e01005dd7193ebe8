"""The tables of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unisono.adapt.layout_trials import Layout
from unisono_lab.analysis.analysis import Analysis, Curve
from unisono_lab.analysis.estimate import NOTHING, Estimate, interval, listed, number, percent, shown
from unisono_lab.analysis.laws import Fit
from unisono_lab.analysis.summary import PARTS, Row

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
    return WrittenTable.of(head, rows, 1, " ".join(notes)).without_empty_columns(NOTHING)


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
    table = WrittenTable.of(head, rows, 2).without_empty_columns(NOTHING)
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
    return WrittenTable.of(head, rows, 2).without_empty_columns(NOTHING)


def fit_table(analysis: Analysis) -> WrittenTable:
    """The laws with their parameters."""
    head = ["study", "scaling", "law", "formula", "parameter", "value", "largest misfit", "runs"]
    rows = [row for curve in analysis.curves for fit in curve.fits for row in _fit_rows(curve, fit)]
    sources = {fit.law.name: fit.law.source for curve in analysis.curves for fit in curve.fits}
    note = "; ".join(f"{name}: {source}" for name, source in sources.items())
    return WrittenTable.of(head, rows, 5, f"Sources: {note}." if note else "").without_empty_columns(NOTHING)


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
    return WrittenTable.of(head, rows, 3, note).without_empty_columns(NOTHING)


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
    return WrittenTable.of(head, rows, 1).without_empty_columns(NOTHING)


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
        """A table in which a field without an interval is its text alone."""
        whole = [[field if isinstance(field, Field) else Field(field) for field in row] for row in rows]
        return cls(head, whole, text_columns, note)

    def with_columns(self, places: Sequence[int]) -> WrittenTable:
        """Some of its columns."""
        rows = [[row[place] for place in places] for row in self.rows]
        words = sum(place < self.text_columns for place in places)
        return WrittenTable([self.head[place] for place in places], rows, words, self.note)

    def without_empty_columns(self, nothing: str) -> WrittenTable:
        """The same without columns in which nothing stands."""
        kept = [
            place for place in range(len(self.head)) if any(row[place].text not in ("", nothing) for row in self.rows)
        ]
        return self.with_columns(kept)
