"""Searching for the largest batch: trials are run, one after the other, and what came of them is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from unisono.checkpoint.folder import RunFolder
from unisono.errors import DataError, JobError, LaunchError
from unisono.launch.ending.out_of_memory import ran_out_of_memory
from unisono.launch.ending.outcome import Outcome
from unisono.launch.ending.result import in_a_line, last_lines, open_folder
from unisono.launch.local import Launcher
from unisono.launch.settings import LaunchSettings
from unisono.launch.terminal.terminal import SilentTerminal
from unisono_lab.analysis.batch_curve import BatchCurve, Tried
from unisono_lab.measure.batch_search import BatchSearch, Found
from unisono_lab.measure.measured_run import peak_mib
from unisono_lab.measure.measuring import Interrupted
from unisono_lab.replay.record import Record

UNTIMED_SHARE = 10
"""A tenth of a trial's steps, one at least, is not timed."""

Try = Callable[[int], Tried]
"""Tries a batch, in processes that know nothing of those before."""


@dataclass(frozen=True, slots=True)
class Searched:
    """A search that is over.

    Attributes:
        found: the answer.
        trials: the trials by batch, smallest first.
    """

    found: Found
    trials: dict[int, Tried]

    def curve(self, search: BatchSearch, memory_limit_mib: float | None, command: str) -> BatchCurve:
        """As it is kept for reports.

        Args:
            search: the search and its limits.
            memory_limit_mib: the memory limit of each worker.
            command: the command of the search.
        """
        return BatchCurve(
            rows=tuple(self.trials.values()),
            largest=self.found.largest,
            best=self.found.best,
            with_margin=self.found.with_margin,
            workers=search.workers,
            memory_limit_mib=memory_limit_mib,
            margin=search.margin,
            command=command,
        )


def searched(search: BatchSearch, attempt: Try, tell: Callable[[Tried], None]) -> Searched:
    """Search until there is an answer.

    Args:
        search: the search to make, which was checked before.
        attempt: a function that tries a batch.
        tell: a function that gets the result of each trial.
    """
    trials: dict[int, Tried] = {}
    while isinstance(batch := search.next(trials), int):
        trials[batch] = attempt(batch)
        tell(trials[batch])
    return Searched(batch, dict(sorted(trials.items())))


def finished_trial(folder: Path, batch: int, peak: float | None, limit: float | None = None) -> Tried:
    """What the run folder of a trial tells that ended well.

    Args:
        folder: its run folder.
        batch: samples per worker.
        peak: MiB that a worker was seen to need at most, for a script that does not tell with ``run.finish``.
        limit: MiB of the host's memory that a worker may need; one may have grown beyond it when nobody looked.

    Raises:
        JobError: it took no step.
    """
    record = Record.read(folder)
    lines = record.steps
    if not lines:
        raise JobError(
            "the script took no step, so nothing is known of its memory: it needs a loop over run.steps with data in it"
        )
    whole = [line for line in lines if line["batch_size"] == record.batch_size] or lines
    timed = whole[max(1, len(whole) // UNTIMED_SHARE) :]
    rates = [line["batch_size"] / line["seconds"]["total"] for line in timed]
    result = RunFolder(folder).read_result() or {}
    workers = result.get("workers") or []
    needed = max((one["peak_memory_mib"] for one in workers), default=0.0)
    if limit is not None and needed > limit:
        return failing_trial(
            folder, batch, needed, f"a worker needed {needed:.1f} MiB, more than its limit of {limit:.0f}"
        )
    told = max((peak_mib(one) for one in workers), default=0.0)
    return Tried(
        batch,
        fits=True,
        samples_per_s=round(median(rates), 3) if rates else None,
        peak_mib=told or peak,
        shards=record.job.shards,
        data_samples=result.get("dataset_samples"),
    )


def failing_trial(folder: Path, batch: int, peak: float | None, words: str) -> Tried:
    """What is known of a trial that needed too much memory.

    Args:
        folder: its run folder.
        batch: samples per worker.
        peak: MiB that a worker was seen to need at most.
        words: what happened.
    """
    job = RunFolder(folder).read_job() or {}
    return Tried(batch, fits=False, peak_mib=peak, shards=job.get("shards"), words=words)


# Trials of a batch, each started by this host's launcher.

OTHERS = ("UNISONO_STOP_AFTER_EPOCHS", "UNISONO_BATCH_SCALE", "UNISONO_BATCH_SCALE_WARMUP")
"""Variables of the shell that would change what is tried."""


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """Tries batches with this machine's launcher.

    Attributes:
        settings: the launch settings of all trials.
        steps: the number of steps of each trial.
        failed: the folder for the run folder of a trial that failed for another reason than its memory.
    """

    settings: LaunchSettings
    steps: int
    failed: Path

    def attempt(self, batch: int, launcher: Launcher, folder: Path) -> Tried:
        """Try one. Main thread only.

        Args:
            batch: samples per worker.
            launcher: the launcher of all trials.
            folder: the folder for its run folder, which is removed.

        Raises:
            Interrupted: by a signal.
            JobError: the script takes no steps.
            LaunchError: it failed, and not for its memory; names its log.
        """
        place = folder / f"batch-{batch}"
        run_folder = open_folder(place, self.settings.script.stem)
        outcome = launcher.launch(self.told(batch), run_folder, SilentTerminal())
        if outcome.interrupted is not None:
            raise Interrupted(outcome.interrupted)
        silent = [each.rank for each in outcome.exits if each.failure is None]
        said = {rank: last_lines(run_folder.log_of(rank)) for rank in silent}
        peak = max((each.peak_mib or 0.0 for each in outcome.exits), default=0.0) or None
        if words := ran_out_of_memory(outcome, said):
            tried = failing_trial(place, batch, peak, words)
        elif outcome.exit_code != 0:
            shutil.rmtree(self.failed, ignore_errors=True)
            shutil.move(place, self.failed)
            raise LaunchError(failure_words(outcome, batch, self.settings.workers, RunFolder(self.failed)))
        else:
            tried = finished_trial(place, batch, peak, self.settings.memory_limit_mib)
        shutil.rmtree(place, ignore_errors=True)
        return tried

    def told(self, batch: int) -> LaunchSettings:
        """How to start a trial."""
        variables = {
            "UNISONO_STUDY": "1",
            "UNISONO_BATCH_SIZE": str(batch * self.settings.workers),
            "UNISONO_STOP_AFTER": str(self.steps),
            **{name: "" for name in OTHERS if os.environ.get(name)},
        }
        return replace(self.settings, extra_environment=variables)


def failure_words(outcome: Outcome, batch: int, workers: int, folder: RunFolder) -> str:
    """What to say when a trial failed for another reason than its memory.

    Args:
        outcome: the outcome of its launch.
        batch: the number of samples per worker.
        workers: the number of workers.
        folder: its run folder.
    """
    samples = f"{batch} per worker" if workers > 1 else f"{batch}"
    words, log = in_a_line(outcome, folder)
    failure = outcome.cause and outcome.cause.failure
    # The first batch is the only one that may be larger than the data set.
    hint = "; the search may begin with less: --from" if failure and failure.type.endswith(DataError.__name__) else ""
    return f"with a batch of {samples} the script fails, and not for its memory: {words}{hint} (log: {log})"
