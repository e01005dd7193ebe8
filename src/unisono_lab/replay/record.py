"""The record of a run, read from its run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono.job import Job
from unisono.jsonl import damaged_lines, read_lines


@dataclass(frozen=True, slots=True)
class Record:
    """A run as its folder has it, whether it is over or not.

    Attributes:
        path: the folder's path.
        job: the job that was trained.
        journal: the events, in the order in which they were written.
        metrics: lines of steps, and what the script logged beside them.
        damaged: the lines that could not be read and are left out, for people.
    """

    path: Path
    job: Job
    journal: Sequence[Mapping[str, Any]]
    metrics: Sequence[Mapping[str, Any]]
    damaged: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a folder.

        Raises:
            JobError: it is no run folder, nothing has been recorded in it, or it cannot be read.
        """
        folder = RunFolder(path)
        job = _job(folder)
        files = [folder.path / "journal.jsonl", folder.path / "metrics.jsonl"]
        try:
            journal, metrics = map(read_lines, files)
            damaged = [_damage(file, numbers) for file in files if (numbers := damaged_lines(file))]
        except OSError as error:
            raise JobError(f"{folder.path} cannot be read: {error}") from error
        if not journal and not metrics:
            raise JobError(
                f"nothing is recorded in {folder.path}: journal.jsonl and metrics.jsonl are missing or empty"
            )
        return cls(folder.path, job, journal, metrics, damaged)

    @property
    def batch_size(self) -> int:
        """The samples in the first global batch; 0 if nothing tells."""
        return self.job.batch_size or next((line["batch_size"] for line in self.steps), 0)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The lines of steps alone."""
        return [line for line in self.metrics if "loss" in line and "step" in line]


def _job(folder: RunFolder) -> Job:
    if not folder.path.is_dir():
        raise JobError(f"there is no run folder {folder.path}: unisono run prints where it is when it starts")
    found = folder.read_job()
    if found is None:
        inside = sorted(path.parent.name for path in folder.path.glob("*/job.json"))
        hint = f"; did you mean {folder.path / inside[-1]}?" if inside else ""
        raise JobError(f"{folder.path} is no run folder: it has no job.json{hint}")
    try:
        return Job(**found)
    except (JobError, TypeError) as error:
        raise JobError(f"{folder.path / 'job.json'} is no job of this version: {error}") from error


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with values from a file, with its place."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _damage(file: Path, numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:10])) + (" …" if len(numbers) > 10 else "")
    some = "line" if len(numbers) == 1 else "lines"
    return f"{file}: {some} {listed} cannot be read and {'is' if len(numbers) == 1 else 'are'} left out"
