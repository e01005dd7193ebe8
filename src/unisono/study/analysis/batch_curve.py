"""The results of a search for the largest batch: memory and throughput, by batch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unisono.errors import JobError

NAME = "batch-size.json"
FAILED_NAME = "batch-size.failed"
"""Beside it: the run folder of a trial that failed, and not for its memory."""


class BatchTrial(BaseModel):
    """A batch that was tried.

    Attributes:
        batch: samples per worker.
        samples_per_s: throughput; None if it was not timed.
        peak_mib: memory that a worker needed at most; None if it was not measured.
        fits: whether a step could be computed.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    batch: int = Field(ge=1)
    samples_per_s: float | None = Field(default=None, gt=0)
    peak_mib: float | None = Field(default=None, ge=0)
    fits: bool


class BatchCurve(BaseModel):
    """All of them. Batches are samples per worker.

    Attributes:
        rows: the trials.
        largest: batch that fits; None if none did.
        best: batch with the highest throughput, among those that leave the margin.
        with_margin: the largest that leaves the margin.
        workers: the number of workers.
        memory_limit_mib: the memory limit of each worker.
        margin: share of the largest batch by which the other two stay below it.
        command: the command of the search.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    rows: tuple[BatchTrial, ...] = ()
    largest: int | None = None
    best: int | None = None
    with_margin: int | None = None
    workers: int = 1
    memory_limit_mib: float | None = None
    margin: float | None = None
    command: str = ""

    @property
    def fitting(self) -> list[BatchTrial]:
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
