"""The results of a search for the largest batch: memory and throughput, by batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unisono.errors import JobError

NAME = "batch-size.json"
FAILED_NAME = "batch-size.failed"
"""Beside it: the run folder of a trial that failed, and not for its memory."""


Above0 = Annotated[float, Field(gt=0)]
From0 = Annotated[float, Field(ge=0)]

Bound = Literal["memory", "data", "most"]

NotKept = Field(exclude=True)
"""What the search goes by, and no report."""


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a trial.

    Attributes:
        batch: samples per worker.
        fits: whether every worker took all its steps within its memory.
        samples_per_s: samples per second of all workers together; None if it could not be timed.
        peak_mib: memory that a worker needed at most; None if it is not known.
        shards: the job's number of shards; None if it did not come so far.
        data_samples: the number of samples in the script's data set; None likewise.
        words: why it does not fit.
    """

    batch: Annotated[int, Field(ge=1)]
    fits: bool
    samples_per_s: Above0 | None = None
    peak_mib: From0 | None = None
    shards: Annotated[int | None, NotKept] = None
    data_samples: Annotated[int | None, NotKept] = None
    words: Annotated[str, NotKept] = ""


class BatchCurve(BaseModel):
    """All of them. Batches are samples per worker.

    Attributes:
        rows: the trials.
        largest: batch that fits; None if none did.
        best: batch with the highest throughput, among those that leave the margin.
        with_margin: the largest that leaves the margin.
        bound: the reason why the largest is not larger.
        workers: the number of workers.
        memory_limit_mib: the memory limit of each worker.
        margin: share of the largest batch by which the other two stay below it.
        command: the command of the search.
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
    """From a study's folder; None if no batch was searched for.

    Raises:
        JobError: the file holds something else.
    """
    path = folder / NAME
    try:
        return BatchCurve.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
