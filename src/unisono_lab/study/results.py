"""The measurements of a scaling study, and their files."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from unisono.checkpoint.folder import write_json
from unisono.errors import JobError
from unisono_lab.recorded.record import problems

Mode = Literal["strong", "weak", "baseline"]

CSV_NAME, JSON_NAME, SETTINGS_NAME = "results.csv", "results.json", "study.json"
"""The names of files in a study's folder."""

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
FORMULA_WORDS = "begins with one of = + - @ or a tab, with which a spreadsheet would begin a formula"
"""The first characters that a label must not have, since spreadsheets open results.csv, and the error message."""


class Cell(BaseModel):
    """One measured run, or one epoch of it.

    A field is None if it was not measured. The first epoch and the warm-up steps are not in it; where a row is an
    epoch, epoch 1 is left out of all figures as long as the same run has later ones.

    Attributes:
        label: the name of the measured model, machine or version. Things that are compared have different labels.
        mode: ``strong`` keeps the global batch, ``weak`` the batch per worker, ``baseline`` is the plain loop, in one
            process without Unisono.
        workers: the number of workers; for a baseline, the number of workers that have as many threads together.
        repeat: the number of the repeat, from 0.
        batch_size: the number of samples in a global batch.
        learning_rate: the learning rate after the warm-up.
        epoch: the number of the epoch, from 1, if the row is one epoch of a run.
        samples: the number of samples of the measured time.
        seconds: the measured time.
        epoch_s: seconds of a whole epoch.
        step_s: median seconds of a step.
        data_s: seconds of a step spent waiting for data.
        compute_s: seconds of a step spent in forward and backward.
        exposed_s: seconds of a step's communication that no computation covers.
        update_s: seconds of a step spent in the optimizer.
        wait_s: seconds of a step spent waiting for the slowest worker.
        peak_memory_mib: the peak memory of the worker that needed most, in MiB.
        loss: the loss after the same number of samples in all runs of a label and a mode; None if it is not finite.
        accuracy: the accuracy after the same number of samples, 0 … 1.
        digest: the sha256 of the weights after the same number of samples.
        oversubscribed: whether workers shared cores (workers times threads are more than the cores) or GPUs.
        exit_code: the run's exit code; a row with an exit code other than 0 is left out of all figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    label: str = ""
    mode: Mode = "strong"
    workers: int = Field(ge=1)
    repeat: int = Field(default=0, ge=0)
    batch_size: int | None = Field(default=None, ge=1)
    learning_rate: float | None = Field(default=None, ge=0)
    epoch: int | None = Field(default=None, ge=1)
    samples: int = Field(ge=0)
    seconds: float = Field(ge=0)
    epoch_s: float | None = Field(default=None, gt=0)
    step_s: float | None = Field(default=None, gt=0)
    data_s: float | None = Field(default=None, ge=0)
    compute_s: float | None = Field(default=None, ge=0)
    exposed_s: float | None = Field(default=None, ge=0)
    update_s: float | None = Field(default=None, ge=0)
    wait_s: float | None = Field(default=None, ge=0)
    peak_memory_mib: float | None = Field(default=None, ge=0)
    loss: float | None = None
    accuracy: float | None = None
    digest: str | None = Field(default=None, pattern="^[0-9a-f]*$")
    oversubscribed: bool = False
    exit_code: int = 0

    @field_validator("label")
    @classmethod
    def _no_formula(cls, label: str) -> str:
        if label.startswith(FORMULAS):
            raise ValueError(FORMULA_WORDS)
        return label

    @field_validator("loss", mode="before")
    @classmethod
    def _finite_or_none(cls, loss: Any) -> Any:
        return None if isinstance(loss, float) and not math.isfinite(loss) else loss

    @model_validator(mode="after")
    def _succeeded_or_not(self) -> Cell:
        if self.succeeded and not (self.samples > 0 and self.seconds > 0):
            raise ValueError("a run that succeeded has samples and seconds above 0")
        return self

    @property
    def succeeded(self) -> bool:
        """Whether the run ended well, so that the row counts."""
        return self.exit_code == 0

    @property
    def samples_per_s(self) -> float:
        """The throughput of a run that succeeded."""
        return self.samples / self.seconds


class Results(BaseModel):
    """All measurements of a study.

    Attributes:
        version: the version of the form of results.json.
        cells: the measurements, in the order of measuring.
        environment: the facts of the host and its software, which the report shows unchanged. The analysis uses
            ``cores``, and for the model of a step ``latency_s`` (of a message between two workers) and
            ``bandwidth_bytes_per_s``.
        commands: the commands of the study and of its runs.
        settings: the settings of the study, which the report shows unchanged. The analysis uses ``epoch_samples`` (the
            samples of an epoch, for epoch times that were not measured), and for models of a step ``shards`` and
            ``gradient_bytes`` (the bytes that a step reduces). Each is a number, or a number for each label.
        notes: sentences that say how the figures were measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    cells: tuple[Cell, ...] = ()
    environment: Mapping[str, Any] = Field(default_factory=dict)
    commands: tuple[str, ...] = ()
    settings: Mapping[str, Any] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def figure(self, name: str, label: str) -> float | None:
        """A number among the settings or the environment; None if it is not there."""
        value = self.settings.get(name, self.environment.get(name))
        if isinstance(value, Mapping):
            value = value.get(label)
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def write(self, folder: Path) -> None:
        """Write ``results.csv`` (the cells) and ``results.json`` (everything) into a folder, each whole or not at all.

        Raises:
            JobError: a file cannot be written; the message says why.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / JSON_NAME, self.model_dump(mode="json"))
            beside = folder / f"{CSV_NAME}.part"
            beside.write_text(self.csv(), encoding="utf-8", newline="")
            beside.replace(folder / CSV_NAME)
        except OSError as error:
            raise JobError(f"the results cannot be written into {folder}: {error}") from error

    def csv(self) -> str:
        """The cells as a table: a column for each field, empty where there is no figure."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(Cell.model_fields)
        for cell in self.cells:
            table.writerow(map(_written, cell.model_dump().values()))
        return text.getvalue()

    @classmethod
    def read_json(cls, path: Path) -> Results:
        """Read a ``results.json``.

        Raises:
            JobError: the file cannot be read, or does not hold results.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"{path} cannot be read: {error}") from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise JobError(f"{path} holds no results of this version: {problems(error)}") from error


def _written(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# A table of measured runs, which was made by a study, by hand, or with other software.


ALIASES: Mapping[str, str] = {
    "images": "samples",
    "images_per_s": "samples_per_s",
    "lr": "learning_rate",
    "model": "label",
}
"""Other names of columns."""

RATE = "samples_per_s"

COLUMNS = (*Cell.model_fields, RATE)
"""The possible columns of a table; it needs workers, samples, and one of epoch_s, seconds and samples_per_s."""

TIMES = ("seconds", "epoch_s", RATE)

SHOWN = 10
"""The most bad rows that an error message lists."""


def read_results(path: Path) -> Results:
    """Read results from a study's folder, its ``results.json``, or a table in a CSV file.

    Raises:
        JobError: there are no results, they cannot be read, or rows are wrong; the message names lines and columns.
    """
    if path.is_dir():
        file = next((path / name for name in (JSON_NAME, CSV_NAME) if (path / name).is_file()), None)
        if file is None and (path / SETTINGS_NAME).is_file():
            raise JobError(
                f"the study in {path} is not over: start it again to make the missing measurements; with fewer "
                f"--repeats it reports the existing ones"
            )
        if file is None:
            raise JobError(f"{path} is no study's folder: it has no {JSON_NAME} and no {CSV_NAME}")
        return read_results(file)
    if path.suffix.lower() == ".json":
        return Results.read_json(path)
    return read_table(path)


def read_table(path: Path) -> Results:
    """Read a CSV file with a line of column names, in any order, and a line for each run or each epoch of one.

    Names may be in small or in capital letters. Commas, semicolons or tabs separate columns; with semicolons a comma
    may be a decimal point. Empty fields are figures that were not measured.

    Raises:
        JobError: the file cannot be read, a column is missing, or rows are wrong; the message names lines and columns.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    delimiter = max(",;\t", key=next(iter(text.splitlines()), "").count)
    table = csv.reader(io.StringIO(text), delimiter=delimiter)
    columns = [ALIASES.get(name, name) for name in (word.strip().lower() for word in next(table, []))]
    if missing := _missing(columns):
        raise JobError(f"{path}: {missing}. Its columns are {', '.join(columns) or 'none'}")
    numbered, bad = [], []
    for line, fields in _rows(table, columns, has_decimal_commas=delimiter == ";"):
        try:
            numbered.append((line, Cell.model_validate(_measured(fields))))
        except ValidationError as error:
            bad += [f"line {line}, {_problem(problem)}" for problem in error.errors() if _is_about_row(problem, fields)]
        except ValueError as error:
            bad.append(f"line {line}, {error}")
    cells, repeated = _distinct(numbered)
    if bad := bad + repeated:
        more = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise JobError(f"{path}: nothing was read, since rows are wrong:\n  " + "\n  ".join(bad[:SHOWN]) + more)
    if not cells:
        raise JobError(f"{path} has no rows below its column names")
    unknown = [name for name in columns if name and name not in COLUMNS]
    notes = (f"Columns that were not used: {', '.join(unknown)}.",) if unknown else ()
    return Results(cells=tuple(cells if "mode" in columns else _with_modes(cells)), notes=notes)


def _missing(columns: Sequence[str]) -> str:
    """A message about columns that are missing, or occur twice; empty if there are none."""
    for name, count in Counter(columns).items():
        if count > 1 and name:
            return f"the column {name} occurs twice"
    missing = [name for name in ("workers", "samples") if name not in columns]
    if missing:
        hint = " (or images)" if "samples" in missing else ""
        return f"the column {' and the column '.join(missing)}{hint} is missing"
    return "" if any(name in columns for name in TIMES) else f"one of {', '.join(TIMES)} is missing"


def _rows(table: Any, columns: Sequence[str], *, has_decimal_commas: bool) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows that are not empty: the line on which each begins, and its fields by column."""
    counts: Counter[tuple[str, ...]] = Counter()
    begins = table.line_num + 1
    for row in table:
        fields = {name: text.strip() for name, text in zip(columns, row, strict=False) if text.strip()}
        if has_decimal_commas:
            words = ("label", "digest")
            fields = {name: text if name in words else text.replace(",", ".") for name, text in fields.items()}
        if len(row) > len(columns):
            fields["…"] = row[len(columns)]  # a comma too many has moved the fields behind it into wrong columns
        if fields:
            same = tuple(fields.get(name, "") for name in ("label", "mode", "workers", "epoch", "batch_size"))
            fields.setdefault("repeat", str(counts[same]))
            counts[same] += 1
            yield begins, fields
        begins = table.line_num + 1


def _measured(fields: Mapping[str, str]) -> dict[str, str | float]:
    """The fields of a cell; its seconds are computed from other fields if they are missing.

    Raises:
        ValueError: the seconds cannot be computed, or there are too many fields; the message says why.
    """
    if "…" in fields:
        raise ValueError(f"more fields than columns: {fields['…']!r} is the first one too many")
    measured: dict[str, str | float] = {name: text for name, text in fields.items() if name in Cell.model_fields}
    if "seconds" in measured or measured.get("exit_code", "0") != "0":
        return {"samples": 0, "seconds": 0, **measured}
    if "epoch_s" in measured:
        return {**measured, "seconds": measured["epoch_s"]}
    if RATE not in fields:
        raise ValueError(f"one of {', '.join(TIMES)} must have a figure")
    try:
        return {**measured, "seconds": float(measured.get("samples", "0")) / float(fields[RATE])}
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{RATE}: needs a number above 0, not {fields[RATE]!r}") from None


def _is_about_row(problem: Mapping[str, Any], fields: Mapping[str, str]) -> bool:
    """Whether a problem is about a field that is in the row or missing, and not about a computed one."""
    return not problem["loc"] or problem["type"] == "missing" or problem["loc"][0] in fields


def _problem(problem: Mapping[str, Any]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    where = ".".join(map(str, problem["loc"]))
    return f"{where}: is empty" if problem["type"] == "missing" else f"{where}: {message}, not {problem['input']!r}"


def _distinct(rows: Sequence[tuple[int, Cell]]) -> tuple[list[Cell], list[str]]:
    """The cells, and messages about runs that occur twice.

    Each run of a plain loop gets a repeat of its own: studies of one script in several jobs all measure it.
    """
    first: dict[tuple[Any, ...], int] = {}
    cells, twice = [], []
    for line, row in rows:
        cell = row
        while cell.mode == "baseline" and _run(cell) in first:
            cell = cell.model_copy(update={"repeat": cell.repeat + 1})
        if (first_line := first.setdefault(_run(cell), line)) != line:
            twice.append(f"line {line}, repeat: the same run as in line {first_line}; number the repeats 0, 1, 2 …")
        cells.append(cell)
    return cells, twice


def _run(cell: Cell) -> tuple[Any, ...]:
    return cell.label, cell.mode, cell.workers, cell.repeat, cell.epoch, cell.batch_size


def _with_modes(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with modes that a table without them implies: weak if the batch grows with the workers, else strong."""
    shares: dict[str, set[float | None]] = {}
    for cell in cells:
        shares.setdefault(cell.label, set()).add(cell.batch_size and cell.batch_size / cell.workers)
    batches = {(cell.label, cell.batch_size) for cell in cells}
    counts = Counter(label for label, _ in batches)
    weak = {label for label, label_shares in shares.items() if len(label_shares) == 1 and counts[label] > 1}
    return [cell.model_copy(update={"mode": "weak"}) if cell.label in weak else cell for cell in cells]


# Several studies as one: two models, two machines, two versions.


def side_by_side(studies: Sequence[tuple[str, Results]]) -> Results:
    """All cells of several studies, with labels that name the study.

    A label stays as it is if no other study has it; otherwise the study's name is put before it. A study without a
    label gets its name as the label.
    """
    named = list(zip(_names([name for name, _ in studies]), (results for _, results in studies), strict=True))
    counts = Counter(
        label or name for name, results in named for label in dict.fromkeys(cell.label for cell in results.cells)
    )
    labelled = []
    for name, results in named:
        labels = {cell.label: _label(name, cell.label, counts) for cell in results.cells}
        # A study of one label is named by that label, since settings are looked up by label.
        labelled.append((next(iter(labels.values())) if len(labels) == 1 else name, labels, results))
    renamed = (
        cell.model_copy(update={"label": labels[cell.label]})
        for _, labels, results in labelled
        for cell in results.cells
    )
    return Results(
        cells=tuple(renamed),
        environment=_merged({name: results.environment for name, _, results in labelled}),
        commands=tuple(dict.fromkeys(command for _, _, results in labelled for command in results.commands)),
        settings=_merged({name: results.settings for name, _, results in labelled}),
        notes=tuple(f"{name}: {note}" for name, _, results in labelled for note in results.notes),
    )


def _names(names: Sequence[str]) -> list[str]:
    """Distinct names, none of which begins like a formula: ``study``, ``study (2)``."""
    counts: Counter[str] = Counter()
    distinct = []
    for full_name in names:
        name = full_name.lstrip("".join(FORMULAS)) or "study"
        counts[name] += 1
        distinct.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return distinct


def _label(name: str, label: str, counts: Counter[str]) -> str:
    if not label:
        return name
    return label if counts[label] == 1 else f"{name}: {label}"


def _merged(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Values that all studies share, once; other values by study."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for about in parts.values() for key in about):
        values = {name: about.get(key) for name, about in parts.items()}
        first = next(iter(values.values()))
        merged[key] = first if all(value == first for value in values.values()) else values
    return merged


BATCHES_NAME = "batch-size.json"
FAILED_NAME = "batch-size.failed"
"""The run folder, beside that file, of a trial that failed for another reason than its memory."""


Above0 = Annotated[float, Field(gt=0)]
From0 = Annotated[float, Field(ge=0)]

Bound = Literal["memory", "data", "most"]

NotKept = Field(exclude=True)
"""Marks a field that the search uses, and that is not written into the file."""


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a trial.

    Attributes:
        batch: samples per worker.
        fits: whether every worker took all its steps within its memory.
        samples_per_s: samples per second of all workers together; None if it could not be timed.
        peak_mib: the most memory that a worker needed, in MiB; None if it is not known.
        shards: the job's number of shards; None if the trial ended before it was known.
        data_samples: the number of samples in the script's data set; None if the trial ended before it was known.
        words: the reason why it does not fit.
    """

    batch: Annotated[int, Field(ge=1)]
    fits: bool
    samples_per_s: Above0 | None = None
    peak_mib: From0 | None = None
    shards: Annotated[int | None, NotKept] = None
    data_samples: Annotated[int | None, NotKept] = None
    words: Annotated[str, NotKept] = ""


class BatchCurve(BaseModel):
    """All trials of a search. Batches are samples per worker.

    Attributes:
        largest: the largest batch that fits; None if none did.
        best: the batch with the highest throughput, among those that leave the margin.
        with_margin: the largest batch that leaves the margin.
        bound: the reason why the largest is not larger.
        margin: share of the largest batch by which the other two stay below it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    rows: tuple[Tried, ...] = ()
    largest: int | None = None
    best: int | None = None
    with_margin: int | None = None
    bound: Annotated[Bound, NotKept] = "memory"
    workers: int = 1
    memory_limit_mib: float | None = None
    margin: float | None = None
    command: str = ""

    @property
    def fitting(self) -> list[Tried]:
        """The batches that fit, smallest first."""
        return sorted((row for row in self.rows if row.fits), key=lambda row: row.batch)


def read_batch_curve(folder: Path) -> BatchCurve | None:
    """Read the search in a study's folder; None if there was none.

    Raises:
        JobError: the file cannot be read, or does not hold a search.
    """
    path = folder / BATCHES_NAME
    try:
        return BatchCurve.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
