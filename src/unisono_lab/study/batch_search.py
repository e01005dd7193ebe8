"""The search for the largest batch that fits, as a pure function of the trials so far: doubling, then bisection.

The same trials always lead to the same next one, so tests run the search with simulated memories.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from statistics import median

from unisono.checkpoint.folder import RunFolder
from unisono.errors import DataError, JobError, LaunchError
from unisono.launch.local import Launcher
from unisono.launch.outcome import Outcome, WorkerExit, describe, last_lines
from unisono.launch.settings import LaunchSettings
from unisono.launch.terminal import WorkerName
from unisono.launch.trial import Trial
from unisono_lab.recorded.record import Record
from unisono_lab.study.measured_run import peak_mib
from unisono_lab.study.measuring import Interrupted
from unisono_lab.study.results import BatchCurve, Bound, Tried

# The decision whether a job ended because memory ran out. Nothing here touches the system.


KINDS = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "MemoryError")
"""Types of exceptions that always mean that memory ran out."""

MEMORY_MESSAGES = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|insufficient memory|bad_alloc"
    r"|unable to allocate|ALLOC_FAILED|cudaErrorMemoryAllocation",
    re.IGNORECASE,
)
"""The messages of torch, CUDA's libraries, numpy, the C++ library and Linux about memory that ran out."""

TAKEN = ("SIGKILL", "SIGBUS")
"""The signals by which the kernel ends processes when memory, or shared memory, has run out."""


def ran_out_of_memory(outcome: Outcome, output: Mapping[WorkerName, Sequence[str]]) -> str:
    """A sentence that says which worker ran out of memory; empty if the job ended for another reason.

    Other workers then report the loss of that worker, each in its own way; their messages are ignored. ``output`` has
    the last lines of workers that printed no exception.
    """
    if outcome.exit_code == 0:
        return ""
    out_of_memory = [worker for worker in outcome.exits if _ran_out(worker, output.get(worker.rank, ()))]
    if not out_of_memory:
        return ""
    first = min(out_of_memory, key=lambda worker: worker.began)
    if first.failure is None:
        return describe(first, outcome.host).partition(":" if first.over_mib is None else "\n")[0]
    first_line = (first.failure.message.strip().splitlines() or [""])[0]
    return f"rank {first.rank} on host {outcome.host}: {first.failure.type}: {first_line}"


def _ran_out(worker: WorkerExit, output: Sequence[str]) -> bool:
    if worker.code == 0 or worker.over_mib is not None:
        return worker.code != 0
    if worker.failure is not None:
        return worker.failure.type in KINDS or MEMORY_MESSAGES.search(worker.failure.message) is not None
    if worker.told_at is not None or worker.fault:
        return False
    return worker.signal_name in TAKEN or any(MEMORY_MESSAGES.search(line) for line in output)


# The search for the largest batch that fits.


FIRST = 16
MARGIN = 0.1
RESOLUTION = 0.02
"""The relative precision: bisection ends when the largest batch that fits is known within this share of it."""


@dataclass(frozen=True, slots=True)
class BatchSearch:
    """The settings of a search for the largest batch.

    Attributes:
        most: the largest batch to try; None for no bound.
        margin: share of the largest batch by which the recommended batches stay below it.
    """

    workers: int = 1
    first: int = FIRST
    most: int | None = None
    margin: float = MARGIN

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is started.

        Raises:
            JobError: a number is out of range; the message names it.
        """
        for name, value in (("workers", self.workers), ("from", self.first)):
            if value < 1:
                raise JobError(f"--{name} {value}: needs a number of at least 1")
        if self.most is not None and self.most < self.first:
            raise JobError(f"--most {self.most}: needs at least --from {self.first}, where the search begins")
        if not 0 <= self.margin < 1:
            raise JobError(f"--margin {self.margin:g}: needs a share of the largest batch, at least 0 and below 1")

    def next(self, trials: Mapping[int, Tried]) -> int | BatchCurve:
        """The batch to try next, or the answer."""
        bounds = _Bounds(self, trials)
        if (batch := bounds.next_batch()) is not None:
            return batch
        answer = BatchCurve(
            rows=tuple(trials[size] for size in sorted(trials)), workers=self.workers, margin=self.margin
        )
        if (largest := bounds.low) is None:
            return answer
        with_margin = bounds.below(largest * (1 - self.margin)) if bounds.bound == "memory" else largest
        if with_margin not in trials:
            return with_margin
        timed = [
            tried for tried in trials.values() if tried.fits and tried.samples_per_s and tried.batch <= with_margin
        ]
        best = max(timed, key=lambda tried: (tried.samples_per_s or 0.0, -tried.batch), default=None)
        update = {"largest": largest, "with_margin": with_margin, "bound": bounds.bound, "best": best and best.batch}
        return answer.model_copy(update=update)


class _Bounds:
    """The bounds of the largest batch, from trials. Where they contradict each other, the smaller failure counts."""

    def __init__(self, search: BatchSearch, trials: Mapping[int, Tried]) -> None:
        shards = [tried.shards for tried in trials.values() if tried.shards]
        data = [tried.data_samples // search.workers for tried in trials.values() if tried.data_samples]
        self._first = search.first
        # Only batches whose shards all have the same number of samples: the largest shard decides the peak of memory.
        self.unit = max((number // gcd(number, search.workers) for number in shards), default=1)
        self._data, self._allowed = min(data, default=None), search.most
        limits = [limit for limit in (self._data, self._allowed) if limit is not None]
        self.most = max(self._multiple(min(limits)), 1) if limits else None
        considered = [tried for tried in trials.values() if self.most is None or tried.batch <= self.most]
        self.high = min((tried.batch for tried in considered if not tried.fits), default=None)
        fitting = [tried.batch for tried in considered if tried.fits and (self.high is None or tried.batch < self.high)]
        self.low = max(fitting, default=None)

    @property
    def bound(self) -> Bound:
        """The reason why no larger batch is tried."""
        if self.high is not None or self.low != self.most:
            return "memory"
        return "data" if self._allowed is None or (self._data or self._allowed) < self._allowed else "most"

    def next_batch(self) -> int | None:
        """The next batch to try; None if the largest is known well enough."""
        if self.low is None:
            return self._downwards()
        if self.high is None:
            if self.most is not None and self.low >= self.most:
                return None
            larger = max(self._multiple(2 * self.low), self.unit)
            return larger if self.most is None else min(larger, self.most)
        gap = self.high - self.low
        if gap <= max(self.unit, self.low * RESOLUTION):
            return None
        middle = self._multiple(self.low + gap // 2)
        return middle if middle > self.low else middle + self.unit

    def below(self, batch: float) -> int:
        """The largest batch with equal shards up to this one; the largest that fits, if there is none."""
        assert self.low is not None, "a batch fits"
        equal_shards = int(batch) // self.unit * self.unit
        return equal_shards or self.low

    def _downwards(self) -> int | None:
        if self.high is None:
            return self._first if self.most is None else min(self._first, self.most)
        return None if self.high <= self.unit else max(self._multiple(self.high // 2), self.unit)

    def _multiple(self, batch: int) -> int:
        return batch // self.unit * self.unit or batch


# Searching for the largest batch: trials run one after the other, and their run folders are read.

UNTIMED_SHARE = 10
"""The first steps of a trial are not timed: the steps divided by this number, at least one."""

Try = Callable[[int], Tried]
"""Tries a batch, in fresh processes."""


def searched(
    search: BatchSearch,
    attempt: Try,
    show: Callable[[Tried], None],
    memory_limit_mib: float | None = None,
    command: str = "",
) -> BatchCurve:
    """Search until there is an answer; ``show`` gets the result of each trial."""
    trials: dict[int, Tried] = {}
    while isinstance(answer := search.next(trials), int):
        trials[answer] = attempt(answer)
        show(trials[answer])
    return answer.model_copy(update={"memory_limit_mib": memory_limit_mib, "command": command})


def finished_trial(folder: Path, batch: int, peak: float | None, limit: float | None = None) -> Tried:
    """The result of a trial that ended well, from its run folder.

    Args:
        folder: the run folder.
        batch: samples per worker.
        peak: the largest memory of a worker that the launcher saw, in MiB; used if the script does not call
            ``run.finish``, which reports it.
        limit: the host memory that a worker may use, in MiB; a worker may have exceeded it between two looks of the
            launcher.

    Raises:
        JobError: the script took no step.
    """
    record = Record.read(folder)
    lines = record.steps
    if not lines:
        raise JobError(
            "the script took no step, so its memory was not measured: it needs a loop over run.steps with data"
        )
    full = [line for line in lines if line["batch_size"] == record.batch_size] or lines
    rates = [line["batch_size"] / line["seconds"]["total"] for line in full[max(1, len(full) // UNTIMED_SHARE) :]]
    result = RunFolder(folder).read_result() or {}
    workers = result.get("workers") or []
    needed = max((worker["peak_memory_mib"] for worker in workers), default=0.0)
    if limit is not None and needed > limit:
        words = f"a worker needed {needed:.1f} MiB, more than its limit of {limit:.0f}"
        return failing_trial(folder, batch, needed, words)
    return Tried(
        batch,
        fits=True,
        samples_per_s=round(median(rates), 3) if rates else None,
        peak_mib=max(map(peak_mib, workers), default=0.0) or peak,
        shards=record.job.shards,
        data_samples=result.get("dataset_samples"),
    )


def failing_trial(folder: Path, batch: int, peak: float | None, words: str) -> Tried:
    """The result of a trial that needed too much memory; ``words`` say why, the rest as for :func:`finished_trial`."""
    job = RunFolder(folder).read_job() or {}
    return Tried(batch, fits=False, peak_mib=peak, shards=job.get("shards"), words=words)


# Trials, each started by this host's launcher.

CLEARED = ("UNISONO_STOP_AFTER_EPOCHS", "UNISONO_BATCH_SCALE", "UNISONO_BATCH_SCALE_WARMUP")
"""Environment variables that would change the trials, and are cleared."""


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """Tries batches with this host's launcher.

    Attributes:
        failed: the folder for the run folder of a trial that failed for another reason than its memory.
    """

    settings: LaunchSettings
    steps: int
    failed: Path

    def attempt(self, batch: int, launcher: Launcher, folder: Path) -> Tried:
        """Try a batch; its run folder is removed after the trial. Main thread only.

        Raises:
            Interrupted: a signal interrupted the trial.
            JobError: the script takes no steps.
            LaunchError: the script failed for another reason than its memory; the message names the log.
        """
        trial_folder = folder / f"batch-{batch}"
        trial = Trial.run(self.settings_for(batch), trial_folder, launcher)
        outcome = trial.outcome
        if outcome.interrupted is not None:
            raise Interrupted(outcome.interrupted)
        silent = [worker.rank for worker in outcome.exits if worker.failure is None]
        last_output = {rank: last_lines(trial.folder.log_of(rank)) for rank in silent}
        peak = max((worker.peak_mib or 0.0 for worker in outcome.exits), default=0.0) or None
        if words := ran_out_of_memory(outcome, last_output):
            tried = failing_trial(trial_folder, batch, peak, words)
        elif trial.failed:
            shutil.rmtree(self.failed, ignore_errors=True)
            shutil.move(trial_folder, self.failed)
            raise LaunchError(failure_message(Trial(outcome, RunFolder(self.failed)), batch, self.settings.workers))
        else:
            tried = finished_trial(trial_folder, batch, peak, self.settings.memory_limit_mib)
        shutil.rmtree(trial_folder, ignore_errors=True)
        return tried

    def settings_for(self, batch: int) -> LaunchSettings:
        """The settings with which a trial is started."""
        variables = {
            "UNISONO_STUDY": "1",
            "UNISONO_BATCH_SIZE": str(batch * self.settings.workers),
            "UNISONO_STOP_AFTER": str(self.steps),
            **{name: "" for name in CLEARED if os.environ.get(name)},
        }
        return replace(self.settings, extra_environment=variables)


def failure_message(trial: Trial, batch: int, workers: int) -> str:
    """The message for a trial that failed for another reason than its memory."""
    samples = f"{batch} per worker" if workers > 1 else f"{batch}"
    failure = trial.outcome.cause and trial.outcome.cause.failure
    # The first batch is the only one that may be larger than the data set.
    hint = "; begin with a smaller batch: --from" if failure and failure.type.endswith(DataError.__name__) else ""
    reason = f"with a batch of {samples} the script fails for another reason than its memory: {trial.error}"
    return f"{reason}{hint} (log: {trial.log})"
