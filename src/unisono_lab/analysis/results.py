"""The measurements of a scaling study, and their files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from unisono.checkpoint.folder import write_json
from unisono.errors import JobError

Mode = Literal["strong", "weak", "baseline"]

CSV_NAME, JSON_NAME = "results.csv", "results.json"

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
FORMULA_WORDS = "begins with one of = + - @ or a tab, with which a spreadsheet would begin a formula"
"""What a label must not begin with, since results.csv is opened in spreadsheets, and what to say then."""

VERSION = 1
"""Of the form of results.json."""


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
            write_json(folder / JSON_NAME, {"version": VERSION, **self.model_dump(mode="json")})
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
            return _Stored.model_validate_json(text).results
        except ValidationError as error:
            raise JobError(f"{path} holds no results of this version: {_problems(error)}") from error


class _Stored(Results):
    """As it stands in the file."""

    version: Literal[1]

    @property
    def results(self) -> Results:
        return Results(**{name: getattr(self, name) for name in Results.model_fields})


def _written(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _problems(error: ValidationError) -> str:
    """The first ones, each with the place it has in the file."""
    found = [f"{'.'.join(map(str, problem['loc'])) or 'all'}: {problem['msg']}" for problem in error.errors()]
    return "; ".join(found[:10]) + (f"; and {len(found) - 10} more" if len(found) > 10 else "")
