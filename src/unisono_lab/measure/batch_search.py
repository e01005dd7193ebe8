"""The search for the largest batch that fits, as a pure function of what was tried: doubling, then bisection.

The same trials always lead to the same next one, so the search is tested with memories that are made up.
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
from typing import Any

from unisono.checkpoint.folder import RunFolder
from unisono.errors import DataError, JobError, LaunchError
from unisono.launch.ending.failure import Failure
from unisono.launch.ending.outcome import Outcome, WorkerExit, describe
from unisono.launch.ending.result import in_a_line, last_lines, open_folder
from unisono.launch.local import Launcher
from unisono.launch.settings import LaunchSettings
from unisono.launch.terminal.terminal import SilentTerminal, WorkerName
from unisono_lab.analysis.batch_curve import BatchCurve, Bound, Tried
from unisono_lab.measure.measured_run import peak_mib
from unisono_lab.measure.measuring import Interrupted
from unisono_lab.replay.record import Record

# The decision whether a job ended because memory ran out. Nothing here touches the system.


KINDS = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "MemoryError")
"""Types of exceptions that say nothing else."""

SAID = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|insufficient memory|bad_alloc"
    r"|unable to allocate|ALLOC_FAILED|cudaErrorMemoryAllocation",
    re.IGNORECASE,
)
"""What torch, CUDA's libraries, numpy, the C++ library and Linux say."""

TAKEN = ("SIGKILL", "SIGBUS")
"""How the kernel ends processes for which there is no memory, or no shared memory, left."""


def ran_out_of_memory(outcome: Outcome, said: Mapping[WorkerName, Sequence[str]]) -> str:
    """A sentence that says whose memory did not suffice; empty if that is not why the job ended.

    What other workers say of the loss of that one, each in its own way, is no reason to look further.

    Args:
        outcome: the outcome of the job.
        said: the last lines of each worker that printed no exception, by rank.
    """
    if outcome.exit_code == 0:
        return ""
    found = [each for each in outcome.exits if _ran_out(each, said.get(each.rank, ()))]
    first = min(found, key=lambda each: each.began, default=None)
    return "" if first is None else _words(first, outcome.host)


def _ran_out(worker: WorkerExit, said: Sequence[str]) -> bool:
    if worker.code == 0:
        return False
    if worker.over_mib is not None:
        return True
    if worker.failure is not None:
        return _is_about_memory(worker.failure)
    if worker.told_at is not None:
        return False
    if worker.fault:
        return False
    return worker.signal_name in TAKEN or any(SAID.search(line) for line in said)


def _is_about_memory(failure: Failure) -> bool:
    return failure.type in KINDS or SAID.search(failure.message) is not None


def _words(worker: WorkerExit, host: str) -> str:
    if worker.failure is None:
        return describe(worker, host).partition(":" if worker.over_mib is None else "\n")[0]
    first_line = (worker.failure.message.strip().splitlines() or [""])[0]
    return f"rank {worker.rank} on host {host}: {worker.failure.type}: {first_line}"


# The search for the largest batch that fits, as a pure function of what was tried: doubling, then bisection.


FIRST = 16
MARGIN = 0.1
RESOLUTION = 0.02
"""Bisection ends when the largest batch that fits is known to this share of itself."""


@dataclass(frozen=True, slots=True)
class BatchSearch:
    """The settings of a search for the largest batch.

    Attributes:
        workers: the number of workers.
        first: the batch per worker to begin with.
        most: the largest to try; None without such a bound.
        margin: share of the largest batch by which the recommended ones stay below it.
    """

    workers: int = 1
    first: int = FIRST
    most: int | None = None
    margin: float = MARGIN

    def check(self) -> None:
        """Refuse what cannot work, before anything is started.

        Raises:
            JobError: a number is out of range; names it.
        """
        for name, value in (("workers", self.workers), ("from", self.first)):
            if value < 1:
                raise JobError(f"--{name} {value}: at least 1 is needed")
        if self.most is not None and self.most < self.first:
            raise JobError(f"--most {self.most}: less than --from {self.first}, where the search begins")
        if not 0 <= self.margin < 1:
            raise JobError(f"--margin {self.margin:g}: a share of the largest batch, from 0 and below 1")

    def next(self, trials: Mapping[int, Tried]) -> int | BatchCurve:
        """The batch to try next, or the answer.

        Args:
            trials: the trials so far, by batch.
        """
        known = _Known(self, trials)
        if (batch := known.wanted()) is not None:
            return batch
        largest = known.low
        if largest is None:
            return self._curve(trials)
        with_margin = known.below(largest * (1 - self.margin)) if known.bound == "memory" else largest
        if with_margin not in trials:
            return with_margin
        timed = [one for one in trials.values() if one.fits and one.samples_per_s and one.batch <= with_margin]
        best = max(timed, key=lambda one: (one.samples_per_s or 0.0, -one.batch), default=None)
        fastest = None if best is None else best.batch
        return self._curve(trials, largest=largest, with_margin=with_margin, best=fastest, bound=known.bound)

    def _curve(self, trials: Mapping[int, Tried], **found: Any) -> BatchCurve:
        rows = tuple(trials[batch] for batch in sorted(trials))
        return BatchCurve(rows=rows, workers=self.workers, margin=self.margin, **found)


class _Known:
    """The bounds of the largest batch, from trials. Where they contradict each other, the smaller failure counts."""

    def __init__(self, search: BatchSearch, trials: Mapping[int, Tried]) -> None:
        shards = [one.shards for one in trials.values() if one.shards]
        data = [one.data_samples // search.workers for one in trials.values() if one.data_samples]
        self._first = search.first
        # Batches of which every shard has equally many samples: a larger one decides what memory is needed.
        self.unit = max((each // gcd(each, search.workers) for each in shards), default=1)
        self._data, self._wished = min(data, default=None), search.most
        limits = [limit for limit in (self._data, self._wished) if limit is not None]
        self.most = max(self._multiple(min(limits)), 1) if limits else None
        within = [one for one in trials.values() if self.most is None or one.batch <= self.most]
        self.high = min((one.batch for one in within if not one.fits), default=None)
        fitting = [one.batch for one in within if one.fits and (self.high is None or one.batch < self.high)]
        self.low = max(fitting, default=None)

    @property
    def bound(self) -> Bound:
        """What ends the search upwards."""
        if self.high is not None or self.low != self.most:
            return "memory"
        return "data" if self._wished is None or (self._data or self._wished) < self._wished else "most"

    def wanted(self) -> int | None:
        """The next batch to look at; None if the largest is known well enough."""
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
        """The largest batch up to this one that is worth trying; the largest that fits, if there is none."""
        assert self.low is not None, "a batch fits"
        whole = int(batch) // self.unit * self.unit
        return whole or self.low

    def _downwards(self) -> int | None:
        if self.high is None:
            return self._first if self.most is None else min(self._first, self.most)
        return None if self.high <= self.unit else max(self._multiple(self.high // 2), self.unit)

    def _multiple(self, batch: int) -> int:
        return batch // self.unit * self.unit or batch


# Searching for the largest batch: trials are run, one after the other, and what came of them is read.

UNTIMED_SHARE = 10
"""A tenth of a trial's steps, one at least, is not timed."""

Try = Callable[[int], Tried]
"""Tries a batch, in processes that know nothing of those before."""


def searched(
    search: BatchSearch,
    attempt: Try,
    tell: Callable[[Tried], None],
    memory_limit_mib: float | None = None,
    command: str = "",
) -> BatchCurve:
    """Search until there is an answer.

    Args:
        search: the search to make, which was checked before.
        attempt: a function that tries a batch.
        tell: a function that gets the result of each trial.
        memory_limit_mib: the memory limit of each worker.
        command: the command of the search.
    """
    trials: dict[int, Tried] = {}
    while isinstance(answer := search.next(trials), int):
        trials[answer] = attempt(answer)
        tell(trials[answer])
    return answer.model_copy(update={"memory_limit_mib": memory_limit_mib, "command": command})


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
