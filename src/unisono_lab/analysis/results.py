"""The measurements of a scaling study, and their files."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from unisono.checkpoint.folder import write_json
from unisono.errors import JobError

Mode = Literal["strong", "weak", "baseline"]

CSV_NAME, JSON_NAME, SETTINGS_NAME = "results.csv", "results.json", "study.json"
"""In a study's folder."""

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
FORMULA_WORDS = "begins with one of = + - @ or a tab, with which a spreadsheet would begin a formula"
"""What a label must not begin with, since results.csv is opened in spreadsheets, and what to say then."""


class Cell(BaseModel):
    """One measured run, or one epoch of it.

    A field is None if it was not measured. The first epoch and the warm-up steps are not in it; where a row is an
    epoch, epoch 1 is left out of all figures as long as the same run has later ones.

    Attributes:
        label: the name of the measured model, machine or version. Things that are compared have different labels.
        mode: ``strong`` keeps the global batch, ``weak`` the batch per worker, ``baseline`` is the plain loop, in one
            process without Unisono.
        workers: the number of workers; for a baseline, it had the threads of so many workers.
        repeat: the number of the repeat, from 0.
        batch_size: the number of samples in a global batch.
        learning_rate: the learning rate after the warm-up.
        epoch: its number, from 1, if the row is one epoch of a run.
        samples: the number of samples of the measured time.
        seconds: the measured time.
        epoch_s: seconds of a whole epoch.
        step_s: median seconds of a step.
        data_s: seconds of a step spent waiting for data.
        compute_s: seconds of a step spent in forward and backward.
        exposed_s: seconds of a step's communication that no computation covers.
        update_s: seconds of a step spent in the optimizer.
        wait_s: seconds of a step spent waiting for the slowest worker.
        peak_memory_mib: the peak memory of the worker that needed most.
        loss: the loss after the same number of samples in all runs of a label and a mode; one that is not finite counts
            as none.
        accuracy: a share, 0 … 1, at the same moment.
        digest: SHA-256 of the weights at the same moment.
        oversubscribed: workers times threads were more than the machine has cores (or workers more than GPUs).
        exit_code: the run's exit code; a row with another one than 0 is left out of all figures.
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
        """Whether it is a measurement at all."""
        return self.exit_code == 0

    @property
    def samples_per_s(self) -> float:
        """Throughput; of a run that succeeded."""
        return self.samples / self.seconds


class Results(BaseModel):
    """All measurements of a study.

    Attributes:
        version: the version of the form of results.json.
        cells: the measurements, in the order of measuring.
        environment: the facts of the machine and its software, shown as they are. Used besides: ``cores``, and for the
            model of a step ``latency_s`` (of a message between two workers) and ``bandwidth_bytes_per_s``.
        commands: the commands that were run, each as one could type it.
        settings: the settings of the study, shown as they are. Used besides: ``epoch_samples`` (the samples of an
            epoch, for epoch times that were not measured), and for models of a step ``shards`` and ``gradient_bytes``
            (that are reduced in a step). Each is a number, or a number for each label.
        notes: sentences that a reader of the figures should know.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    cells: tuple[Cell, ...] = ()
    environment: Mapping[str, Any] = Field(default_factory=dict)
    commands: tuple[str, ...] = ()
    settings: Mapping[str, Any] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def figure(self, name: str, label: str) -> float | None:
        """A number among the settings or the environment; None if it is not there.

        Args:
            name: the name of the figure.
            label: the label that the figure is about, where there is a number for each label.
        """
        found = self.settings.get(name, self.environment.get(name))
        if isinstance(found, Mapping):
            found = found.get(label)
        return found if isinstance(found, int | float) and math.isfinite(found) else None

    def write(self, folder: Path) -> None:
        """Write ``results.csv`` (the cells) and ``results.json`` (everything) into a folder, each whole or not at all.

        Raises:
            JobError: it cannot be written; says why.
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
            JobError: it cannot be read, or holds something else.
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
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def problems(error: ValidationError) -> str:
    """The first ones, each with the place it has in the file."""
    found = [f"{'.'.join(map(str, problem['loc'])) or 'all'}: {problem['msg']}" for problem in error.errors()]
    return "; ".join(found[:10]) + (f"; and {len(found) - 10} more" if len(found) > 10 else "")


# A table of measured runs that somebody made: by a study, by hand, or with other software.


ALIASES: Mapping[str, str] = {
    "images": "samples",
    "images_per_s": "samples_per_s",
    "lr": "learning_rate",
    "model": "label",
}
"""What a column may be called, too."""

RATE = "samples_per_s"

COLUMNS = (*Cell.model_fields, RATE)
"""All that a table may have; it needs workers, samples, and one of epoch_s, seconds and samples_per_s."""

TIMES = ("seconds", "epoch_s", RATE)

SHOWN = 10
"""Bad rows that a message lists."""


def read_results(path: Path) -> Results:
    """What was measured, from a study's folder, its ``results.json``, or a table in a CSV file.

    Raises:
        JobError: there is nothing, it cannot be read, or rows make no sense: each by its line and column.
    """
    if path.is_dir():
        found = next((path / name for name in (JSON_NAME, CSV_NAME) if (path / name).is_file()), None)
        if found is None and (path / SETTINGS_NAME).is_file():
            raise JobError(
                f"the study in {path} is not over: start it again, and it goes on with what is missing; with fewer "
                f"--repeats it reports what is there"
            )
        if found is None:
            raise JobError(f"{path} is no study's folder: it has no {JSON_NAME} and no {CSV_NAME}")
        return read_results(found)
    if path.suffix.lower() == ".json":
        return Results.read_json(path)
    return read_table(path)


def read_table(path: Path) -> Results:
    """Read a CSV file with a line of column names, in any order, and a line for each run or each epoch of one.

    Names count in small and in capital letters. Commas, semicolons or tabs stand between columns; with semicolons a
    comma may be a decimal point. Empty fields are figures that were not measured.

    Raises:
        JobError: it cannot be read, a column is missing, or rows make no sense: each by its line and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    lines = _Lines(text)
    if missing := lines.missing():
        raise JobError(f"{path}: {missing}. Its columns are {', '.join(lines.columns) or 'none'}")
    cells, bad = [], []
    for line, fields in lines:
        try:
            cells.append((line, Cell.model_validate(_measured(fields))))
        except ValidationError as error:
            bad += [f"line {line}, {_problem(problem)}" for problem in error.errors() if _is_said(problem, fields)]
        except ValueError as error:
            bad.append(f"line {line}, {error}")
    cells = _numbered_on(cells)
    bad += _twice(cells)
    if bad:
        more = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise JobError(f"{path}: nothing was read, since rows make no sense:\n  " + "\n  ".join(bad[:SHOWN]) + more)
    if not cells:
        raise JobError(f"{path} has no rows below its column names")
    found = [cell for _, cell in cells]
    unknown = [name for name in lines.columns if name and name not in COLUMNS]
    notes = (f"Columns that were not used: {', '.join(unknown)}.",) if unknown else ()
    return Results(cells=tuple(found if "mode" in lines.columns else _with_modes(found)), notes=notes)


class _Lines:
    """The rows of a table, of which the columns may have other names; empty ones are left out."""

    def __init__(self, text: str) -> None:
        first = next(iter(text.splitlines()), "")
        self._delimiter = max(",;\t", key=first.count)
        self._rows = csv.reader(io.StringIO(text), delimiter=self._delimiter)
        names = [name.strip().lower() for name in next(self._rows, [])]
        self.columns = [ALIASES.get(name, name) for name in names]

    def missing(self) -> str:
        """Which columns are not there, or there twice, for people; empty if all is well."""
        twice = [name for name, count in Counter(self.columns).items() if count > 1 and name]
        if twice:
            return f"the column {twice[0]} is there twice"
        lacking = [name for name in ("workers", "samples") if name not in self.columns]
        if lacking:
            hint = " (or images)" if "samples" in lacking else ""
            return f"the column {' and the column '.join(lacking)}{hint} is missing"
        return "" if any(name in self.columns for name in TIMES) else f"one of {', '.join(TIMES)} is missing"

    def __iter__(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Each row with the line on which it begins, and what is in it."""
        counts: Counter[tuple[str, ...]] = Counter()
        begins = self._rows.line_num + 1
        for row in self._rows:
            fields = {
                name: self._plain(name, text) for name, text in zip(self.columns, row, strict=False) if text.strip()
            }
            if len(row) > len(self.columns):
                fields["…"] = row[len(self.columns)]  # a comma too many: all that follow stand in the wrong column
            if fields:
                same = tuple(fields.get(name, "") for name in ("label", "mode", "workers", "epoch", "batch_size"))
                fields.setdefault("repeat", str(counts[same]))
                counts[same] += 1
                yield begins, fields
            begins = self._rows.line_num + 1

    def _plain(self, name: str, text: str) -> str:
        """Of a table with semicolons a comma may be a decimal point."""
        has_commas = self._delimiter == ";" and name not in ("label", "digest")
        return text.strip().replace(",", ".") if has_commas else text.strip()


def _measured(fields: Mapping[str, str]) -> dict[str, str | float]:
    """The fields of a cell: its seconds may follow from others.

    Raises:
        ValueError: they do not; says why.
    """
    if "…" in fields:
        raise ValueError(f"more fields than columns: {fields['…']!r} is the first one too many")
    found: dict[str, str | float] = {name: text for name, text in fields.items() if name in Cell.model_fields}
    if "seconds" in found or found.get("exit_code", "0") != "0":
        return {"samples": 0, "seconds": 0, **found}
    if "epoch_s" in found:
        return {**found, "seconds": found["epoch_s"]}
    if RATE not in fields:
        raise ValueError(f"one of {', '.join(TIMES)} must have a figure")
    try:
        return {**found, "seconds": float(found.get("samples", "0")) / float(fields[RATE])}
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{RATE}: a number above 0 is wanted, not {fields[RATE]!r}") from None


def _is_said(problem: Mapping[str, Any], fields: Mapping[str, str]) -> bool:
    """Whether it is about something that stands in the row, or should: not about what follows from it."""
    return not problem["loc"] or problem["type"] == "missing" or problem["loc"][0] in fields


def _problem(problem: Mapping[str, Any]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    where = ".".join(map(str, problem["loc"]))
    return f"{where}: is empty" if problem["type"] == "missing" else f"{where}: {message}, not {problem['input']!r}"


def _numbered_on(cells: Sequence[tuple[int, Cell]]) -> list[tuple[int, Cell]]:
    """With a repeat of its own for each run of a plain loop: studies of one script in several jobs all measure it."""
    seen: set[tuple[Any, ...]] = set()
    found = []
    for line, cell in cells:
        while cell.mode == "baseline" and _run(cell) in seen:
            cell = cell.model_copy(update={"repeat": cell.repeat + 1})  # noqa: PLW2901 (until it has a number of its own)
        seen.add(_run(cell))
        found.append((line, cell))
    return found


def _run(cell: Cell) -> tuple[Any, ...]:
    return cell.label, cell.mode, cell.workers, cell.repeat, cell.epoch, cell.batch_size


def _twice(cells: Sequence[tuple[int, Cell]]) -> list[str]:
    """What was given for the same run two times."""
    first: dict[tuple[Any, ...], int] = {}
    found = []
    for line, cell in cells:
        if (other := first.setdefault(_run(cell), line)) != line:
            found.append(f"line {line}, repeat: the same run as in line {other}; number the repeats 0, 1, 2 …")
    return found


def _with_modes(cells: Sequence[Cell]) -> list[Cell]:
    """Where the table does not say it: weak scaling if the batch grows with the workers, otherwise strong."""
    shares: dict[str, set[float | None]] = {}
    for cell in cells:
        shares.setdefault(cell.label, set()).add(cell.batch_size and cell.batch_size / cell.workers)
    batches = {(cell.label, cell.batch_size) for cell in cells}
    counts = Counter(label for label, _ in batches)
    weak = {label for label, found in shares.items() if len(found) == 1 and counts[label] > 1}
    return [cell.model_copy(update={"mode": "weak"}) if cell.label in weak else cell for cell in cells]


# Several studies as one: two models, two machines, two versions.


def side_by_side(studies: Sequence[tuple[str, Results]]) -> Results:
    """All cells of several studies, each under a label that tells which study it is from.

    A study's own label stays if no other study has it; if another has, the study's name stands before it. A study
    without a label is called by its name.

    Args:
        studies: each with its name.
    """
    named = list(zip(_names([name for name, _ in studies]), (results for _, results in studies), strict=True))
    counts = Counter(
        label or name for name, results in named for label in dict.fromkeys(cell.label for cell in results.cells)
    )
    found = []
    for name, results in named:
        labels = {cell.label: _label(name, cell.label, counts) for cell in results.cells}
        # A study of one label is known by it, so that a setting of it is found by the label.
        found.append((next(iter(labels.values())) if len(labels) == 1 else name, labels, results))
    renamed = (
        cell.model_copy(update={"label": labels[cell.label]}) for _, labels, results in found for cell in results.cells
    )
    return Results(
        cells=tuple(renamed),
        environment=_merged({name: results.environment for name, _, results in found}),
        commands=tuple(dict.fromkeys(command for _, _, results in found for command in results.commands)),
        settings=_merged({name: results.settings for name, _, results in found}),
        notes=tuple(f"{name}: {note}" for name, _, results in found for note in results.notes),
    )


def _names(names: Sequence[str]) -> list[str]:
    """Each once, and none that begins as a formula: ``study``, ``study (2)``."""
    seen: Counter[str] = Counter()
    found = []
    for each in names:
        name = each.lstrip("".join(FORMULAS)) or "study"
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def _label(name: str, label: str, counts: Counter[str]) -> str:
    if not label:
        return name
    return label if counts[label] == 1 else f"{name}: {label}"


def _merged(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What all have in common once, the rest by study."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for about in parts.values() for key in about):
        values = {name: about.get(key) for name, about in parts.items()}
        alike = all(value == next(iter(values.values())) for value in values.values())
        found[key] = next(iter(values.values())) if alike else values
    return found
