"""Measuring the curvature of the loss at a checkpoint: the script runs to its first update, and ends there."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.checkpoint.folder import ASKED, FOUND, RunFolder
from unisono.errors import JobError, LaunchError, Unreadable
from unisono.jsonl import to_json
from unisono.launch.ending.result import in_a_line, last_lines, open_folder
from unisono.launch.local import launch
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal.terminal import SilentTerminal
from unisono.launch.tuning import Tuning
from unisono.received import read_object
from unisono.settings.reading import settings_by_path


@dataclass(frozen=True, slots=True)
class CurvatureRequest:
    """A request to measure curvature at a checkpoint.

    Attributes:
        run: the run folder with the checkpoint.
        script: the script that made it, with its arguments.
        step: the number of steps of the checkpoint; None for the newest.
        workers: the number of workers; decides no bit.
        samples: the number of vectors for the trace.
        iterations: the most products with the Hessian for its largest eigenvalue.
        batches: the number of the job's global batches, from the first on, over which the loss is meant.
        tuning: the settings of the workers' memory allocator.
    """

    run: Path
    script: Script
    step: int | None = None
    workers: int = 1
    samples: int = 16
    iterations: int = 50
    batches: int = 1
    tuning: Tuning = field(default_factory=Tuning)

    def checkpoint(self) -> Path:
        """The folder of the checkpoint.

        Raises:
            JobError: a number is out of range, or there is no such checkpoint; lists those that there are.
        """
        for name, value, least in (
            ("--samples", self.samples, 2),  # one says nothing of its error
            ("--iterations", self.iterations, 1),
            ("--batches", self.batches, 1),
        ):
            if value < least:
                raise JobError(f"{name} {value}: at least {least} is needed")
        found = {int(path.name[5:]): path for path in self.run.glob("checkpoints/step-*") if path.name[5:].isdigit()}
        if not found:
            raise JobError(f"{self.run} has no checkpoint: name the run folder of a job that wrote some")
        step = max(found) if self.step is None else self.step
        if step not in found:
            raise JobError(f"{self.run} has no checkpoint of step {step}: it has {', '.join(map(str, sorted(found)))}")
        return found[step].absolute()

    def settings(self, place: Path) -> LaunchSettings:
        """How to start the script.

        Raises:
            JobError: the run folder does not say what its batches are, or the script cannot be run.
        """
        job = _job_of(self.run)
        shards, batch = job.get("shards"), job.get("batch_size")
        environment = {"UNISONO_CURVATURE": str(place)}
        if self.batches > 1:
            if not isinstance(batch, int) or not isinstance(shards, int):
                raise JobError(
                    f"--batches {self.batches}: {self.run / 'job.json'} names no batch size, since the script says it "
                    f"in run.steps: leave --batches out"
                )
            environment["UNISONO_BATCH_SIZE"] = str(self.batches * batch)
        found = LaunchSettings(
            self.script,
            workers=self.workers,
            options=settings_by_path(
                {
                    "shards": shards * self.batches if isinstance(shards, int) else None,
                    "checkpoints.allow_job_change": True,
                }
            ),
            tuning=self.tuning,
            extra_environment=environment,
        )
        found.check()
        return found


def measure(request: CurvatureRequest) -> dict[str, Any]:
    """Measure, and write the figures into the run folder. Main thread only.

    Returns:
        figures by name, as :class:`~unisono.adapt.curvature.Curvature` has them, with the step, batches and samples.

    Raises:
        JobError: the request cannot work.
        LaunchError: the script failed, or took no step; says where its output is.
    """
    checkpoint = request.checkpoint()
    with tempfile.TemporaryDirectory(prefix="unisono-curvature-") as name:
        place = Path(name)
        settings = request.settings(place)
        (place / ASKED).write_bytes(to_json({"iterations": request.iterations, "vectors": request.samples}))
        (place / "run" / "checkpoints").mkdir(parents=True)
        (place / "run" / "checkpoints" / checkpoint.name).symlink_to(checkpoint, target_is_directory=True)
        folder = open_folder(place / "run", request.script.stem)
        outcome = launch(settings, folder, SilentTerminal())
        if outcome.exit_code:
            words, log = in_a_line(outcome, folder)
            raise LaunchError("\n  ".join([f"{request.script.target} failed: {words}", *last_lines(log)]))
        try:
            found = read_object(place / FOUND)
        except (OSError, Unreadable):
            raise LaunchError(
                f"{request.script.target} has called step.run nowhere, so there is no loss to measure: give it the "
                f"arguments with which it trains"
            ) from None
    told = {"step": int(checkpoint.name[5:]), "batches": request.batches, **found}
    (request.run / f"curvature-{checkpoint.name}.json").write_bytes(to_json(told, indent=1))
    return told


def _job_of(run: Path) -> dict[str, Any]:
    try:
        return RunFolder(run).read_job() or {}
    except (OSError, Unreadable) as error:
        raise JobError(f"{run / 'job.json'} cannot be read: {error}") from error
