"""The outcome of a job: the worker to blame, the exit code, the messages, and ``result.json`` in the run folder."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from unisono.checkpoint.folder import UNPROVEN, RunFolder, new_run_folder
from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError, Superseded, Unreadable
from unisono.jsonl import read_lines
from unisono.launch.failure import Failure
from unisono.launch.terminal import Terminal, WorkerName, called, number

HINTS = {
    "SIGKILL": "likely the memory ran out (see dmesg, and the memory limit of the container or of the Slurm job): "
    "a smaller batch, fewer workers or fewer loader processes need less",
    "SIGBUS": "likely shared memory ran out: see the size of /dev/shm; in a container, raise --shm-size",
    "SIGSEGV": "a crash in native code: the Python stacks are in the log",
    "SIGABRT": "native code gave up: its message is in the log",
    "SIGTERM": "someone, or the batch system, ended this one worker",
    "SIGXCPU": "its limit of CPU time is used up (ulimit -t)",
}


COMPLETE = "training was complete by then"
AGAIN = "start it again with the same --run-dir to go on"
WITHOUT_FINISH = "and its script had ended without run.finish, which every worker has to call"
NOT_MISSED = f"{COMPLETE}, and it is not missed"
LINES = (
    "What the script does after run.finish may be missing: if the job has written checkpoints, start it again with the "
    "same --run-dir, and it goes on from the last one"
)


def after_training(digest: str) -> str:
    """What a message says of a failure after training; empty without the digest of the weights."""
    return f"; {COMPLETE}: weights sha256 {digest}. {LINES}" if digest else ""


class Blame(IntEnum):
    """The part of an exit in the job's end, the likeliest cause first."""

    CAUSE = 0
    CONSEQUENCE = 1
    ANSWER = 2
    ENDED_BY_LAUNCHER = 3
    NONE = 4


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The end of one worker.

    Attributes:
        rank: its rank; its id where ranks change.
        code: its exit code; minus the signal's number if a signal ended it.
        time: the time of its end, or that of its script if it is known, in seconds since 1970.
        told_at: the time at which the launcher, ending the job, told it to end; None if it did not.
        peak_mib: the most memory that it was seen to need, in MiB; None if its memory was not watched.
        over_mib: the memory limit, in MiB, for which the launcher ended it; None if it did not.
        pid: its process id; 0 if it had no process.
        fault: the injected fault that has ended it, in words; empty if none has.
    """

    rank: WorkerName
    code: int
    time: float
    failure: Failure | None = None
    told_at: float | None = None
    peak_mib: float | None = None
    over_mib: float | None = None
    pid: int = 0
    fault: str = ""

    @property
    def began(self) -> float:
        """The time of its exception, or of its end without one: the earliest sign of what went wrong."""
        return min(self.time, self.failure.time) if self.failure else self.time

    @property
    def had_ended(self) -> bool:
        """Whether its script had ended already when the launcher told it to end, and it was on its way out."""
        return self.told_at is not None and self.began < self.told_at

    @property
    def shell_code(self) -> int:
        """The exit code as a shell gives it; that of its script, if the launcher ended it on its way out."""
        if self.had_ended and self.failure is not None:
            return self.failure.exit_code
        return self.code if self.code >= 0 else FIRST_SIGNAL - self.code

    @property
    def signal_name(self) -> str:
        """The signal that ended it; empty if none did."""
        if self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:  # a real-time signal has no name
            return f"signal {-self.code}"

    def blame(self, interrupted: int | None = None) -> Blame:
        """How likely this exit is the cause of the job's end; ``interrupted`` is the signal that the launcher got."""
        if self.code in (0, PREEMPTED):
            return Blame.NONE
        if self.told_at is not None and not self.had_ended:
            return Blame.ENDED_BY_LAUNCHER
        if self.failure is not None:
            return Blame.CONSEQUENCE if self.failure.consequence else Blame.CAUSE
        if interrupted is not None and self.shell_code - FIRST_SIGNAL in (signal.SIGINT, signal.SIGTERM):
            return Blame.ANSWER
        return Blame.CAUSE


@dataclass(frozen=True, slots=True)
class JobConclusion:
    """The exit code of a job and the reason for it, where no worker of this host is to blame."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job.

    Attributes:
        workers: the number of workers that the job was to have.
        interrupted: the first signal that the launcher got, if any.
        conclusion: the end of the job where the workers' exits do not decide it, as the coordinator of an elastic job
            says it; otherwise None.
        digest: the digest of the weights, if training is complete, whatever came after it.
        has_main: whether the main worker of the end was one of these, so that it writes ``result.json`` here.
    """

    exits: tuple[WorkerExit, ...]
    workers: int
    host: str
    seconds: float
    interrupted: int | None = None
    conclusion: JobConclusion | None = None
    digest: str = ""
    has_main: bool = False

    @property
    def cause(self) -> WorkerExit | None:
        """The exit that caused the job's end; None if no worker failed by itself."""
        return find_cause(self.exits, self.interrupted)

    @property
    def exit_code(self) -> int:
        """The launcher's own exit code."""
        cause, codes = self.cause, {end.code for end in self.exits}
        if cause is not None and self._is_to_blame(cause):
            return cause.shell_code
        if self.conclusion is not None:
            return self.conclusion.exit_code
        if codes and codes <= {0, PREEMPTED}:
            return max(codes)
        return FIRST_SIGNAL + self.interrupted if self.interrupted is not None else 1

    @property
    def error(self) -> dict[str, object] | None:
        """What went wrong, for ``result.json``; None if nothing did."""
        if self.exit_code == 0:
            return None
        cause = self.cause
        if cause is None or not self._is_to_blame(cause):
            return {"message": self.summary()}
        failure = cause.failure
        return {
            **({"rank": cause.rank} if isinstance(cause.rank, int) else {"worker": cause.rank}),
            "host": self.host,
            "exit_code": cause.shell_code,
            "type": failure.type if failure else cause.signal_name or "SystemExit",
            "message": (failure.message if failure else describe(cause, self.host)) + self.trained,
            "traceback": failure.traceback if failure else None,
        }

    def summary(self) -> str:
        """One line for a person: what happened, and what to do."""
        code, cause = self.exit_code, self.cause
        if code == 0:
            return f"{self.workers} workers done in {self.seconds:.1f} s"
        if code == PREEMPTED:
            if self.interrupted is not None and all(end.code != PREEMPTED for end in self.exits):
                return f"no worker had begun to train here: {AGAIN}, from its newest checkpoint if there is one"
            return f"left with a checkpoint: {AGAIN}"
        if self.conclusion is not None and (cause is None or not self._is_to_blame(cause)):
            return self.conclusion.reason
        if self.interrupted is not None and (cause is None or not self._is_to_blame(cause)):
            return f"ended by {signal.Signals(self.interrupted).name}"
        assert cause is not None, "an exit code other than 0 has a cause"
        return describe(cause, self.host) + self.note + self.trained

    @property
    def trained(self) -> str:
        """The words that training was complete when the job failed; empty if it was not."""
        return "" if self.exit_code == 0 else after_training(self.digest)

    @property
    def reason(self) -> str:
        """What went wrong, without the rank or host: the same for jobs that fail in the same way."""
        cause = self.cause
        failure = None if cause is None else cause.failure
        if failure is not None:
            return f"{failure.type}: {failure.message}"
        return self.summary() if cause is None else cause.signal_name or f"exit code {cause.code}"

    @property
    def note(self) -> str:
        """If all errors only follow from the loss of a worker, the workers that ended without an error; else empty."""
        cause = self.cause
        if cause is None or cause.failure is None or not cause.failure.consequence:
            return ""
        silent = [f"{called(end.rank)} {self._how_it_left(end)}" for end in self.exits if end.failure is None]
        return f" (no error came from the worker that was missed: {', '.join(silent)})" if silent else ""

    def _is_to_blame(self, cause: WorkerExit) -> bool:
        """In an interrupted job only a failure of a worker's own counts."""
        return self.interrupted is None or cause.blame(self.interrupted) is Blame.CAUSE

    def _how_it_left(self, end: WorkerExit) -> str:
        if end.told_at is not None and not end.had_ended:
            return "was ended by the launcher"
        # A worker of an elastic job, which has no rank, may have been asked to leave.
        is_unfinished = end.code == 0 and isinstance(end.rank, int) and not self.digest
        return f"left with exit code {end.code}{f', {WITHOUT_FINISH}' if is_unfinished else ''}"


def find_cause(exits: Sequence[WorkerExit], interrupted: int | None = None) -> WorkerExit | None:
    """The exit that caused the job's end: by blame, then the earliest; None if every worker ended well."""
    failed = [end for end in exits if end.blame(interrupted) is not Blame.NONE]
    return min(failed, key=lambda end: (end.blame(interrupted), end.began, number(end.rank)), default=None)


def describe(worker: WorkerExit, host: str) -> str:
    """One exit in words: ``rank 1 on host a was killed by SIGKILL: likely the memory ran out …``."""
    who = f"{called(worker.rank)} on host {host}"
    if worker.over_mib is not None:
        return (
            f"{who} was ended: it needed {worker.peak_mib or 0:.0f} MiB, more than its limit of {worker.over_mib:.0f}"
        )
    if worker.code < 0 and not worker.had_ended:
        hint = worker.fault or HINTS.get(worker.signal_name)
        return f"{who} was killed by {worker.signal_name}" + (f": {hint}" if hint else "")
    if worker.failure is not None:
        return f"{who} failed with exit code {worker.shell_code}: {worker.failure.type}: {worker.failure.message}"
    return f"{who} ended with exit code {worker.code}"


# What a launcher prints at the end: what went wrong, and where to look.

TAIL_LINES = 15
TAIL_BYTES = 16 * 1024


def report(outcome: Outcome, folder: RunFolder) -> str:
    """The text to print when a job has ended: what was mended, and after a failure the cause's traceback last."""
    return mended(folder) + _failure(outcome, folder)


def mended(folder: RunFolder) -> str:
    """Lines about the faults that were mended in all runs of a run folder; empty if there were none."""
    faults = folder.mended()
    healed, rolled_back = len(faults["healed"]), len(faults["rolled_back"])
    proven = sum(fault["proven"] is True for fault in faults["rolled_back"])
    wrong = {f"rank {fault['rank']} on host {fault['host']}": None for fault in faults["wrong_results"]}
    lines = [f"{', '.join(wrong)} computed wrongly, as an audit found"] if wrong else []
    where = f"{folder.path / 'result.json'} lists them"
    if proven:
        lines.append(f"faults of memory or processors were found and mended: {proven} rolled back; {where}")
    if healed + rolled_back > proven:
        lines.append(
            f"the states of workers differed, {UNPROVEN}: {healed} healed, {rolled_back - proven} rolled back; {where}"
        )
    return "".join(f"unisono: {line}\n" for line in lines)


def _failure(outcome: Outcome, folder: RunFolder) -> str:
    if outcome.exit_code == 0:
        return ""
    cause = outcome.cause
    if cause is None or cause.shell_code != outcome.exit_code or cause.blame(outcome.interrupted) > Blame.CONSEQUENCE:
        return f"unisono: {outcome.summary()} (exit code {outcome.exit_code}, run folder {folder.path})\n"
    log = folder.log_of(cause.rank)
    if cause.failure is not None:
        who = f"{called(cause.rank)} on host {outcome.host} failed"
        message = f"{who} (exit code {outcome.exit_code}, log {log}){outcome.note}{outcome.trained}"
        return f"unisono: {message}\n{cause.failure.traceback}"
    tail = "".join(f"  | {line}\n" for line in last_lines(log))
    quoted = f"unisono: the last lines of {called(cause.rank)} (log {log}):\n{tail}" if tail else ""
    return f"{quoted}unisono: {describe(cause, outcome.host)}{outcome.trained} (exit code {outcome.exit_code})\n"


def last_lines(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


# Workers that an injected fault has ended: its kill must not be taken for memory that ran out.

KINDS = {-signal.SIGKILL: "kill", -signal.SIGTERM: "leave"}
"""Faults that end a worker, by the exit code that it has then."""


def with_faults(exits: Sequence[WorkerExit], folder: RunFolder) -> tuple[WorkerExit, ...]:
    """The same exits; those of workers that a fault has ended say which, as far as the folder's journal knows."""
    if not any(end.code in KINDS for end in exits):
        return tuple(exits)
    injected = {}
    for line in _journal(folder):
        if line.get("event") == "fault" and isinstance(line.get("pid"), int) and isinstance(line.get("kind"), str):
            words = f"injected fault {line.get('number')} ({line.get('kind')}), at step {line.get('step')}"
            injected[line.get("pid"), line.get("kind")] = words
    return tuple(replace(end, fault=injected.get((end.pid, KINDS.get(end.code)), "")) for end in exits)


def _journal(folder: RunFolder) -> list[dict[str, Any]]:
    try:
        return read_lines(folder.path / "journal.jsonl")
    except (OSError, Unreadable):
        return []


RUNS = Path("runs")
"""The folder in which run folders are made for jobs that name none."""

UNKNOWN: Mapping[str, Any] = {"weights_sha256": None, "steps": None, "samples": None}
"""The fields that only the main worker can fill in."""


def open_folder(path: Path | None, stem: str) -> RunFolder:
    """The run folder that the person named, or a new one; the files about the end of an earlier run are removed.

    It is held until it is closed: no other job can start in it.

    Raises:
        JobError: another start has the folder, or it cannot be made or written to; says which, and what to do.
    """
    try:
        folder = RunFolder(path or new_run_folder(RUNS, stem))
        folder.hold()
        folder.logs.mkdir(parents=True, exist_ok=True)
        ends = (*folder.logs.glob("*.error.json"), *folder.logs.glob("*.ended"))
        for stale in (folder.path / "result.json", *ends):
            stale.unlink(missing_ok=True)
    except OSError as error:
        where = path or RUNS.absolute()
        raise JobError(f"the run folder {where} cannot be used: {error}; name another with --run-dir") from error
    return folder


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job, as its launcher knows it.

    Attributes:
        error: the error, by field; None if there was none.
        workers: the number of workers that the job was to have.
        seconds: the seconds from the first start to the last end.
        digest: the digest of the weights, if training is complete; a main worker on another host writes its own there.
    """

    exit_code: int
    error: Mapping[str, object] | None
    workers: int
    seconds: float
    digest: str = ""

    @classmethod
    def of(cls, outcome: Outcome) -> "JobEnd":
        """The end of a job whose workers were started."""
        return cls(outcome.exit_code, outcome.error, outcome.workers, outcome.seconds, outcome.digest)

    def write(self, folder: RunFolder) -> None:
        """Write ``result.json``. The fields that the main worker has written there are kept, save exit code and error.

        If main worker and job both ended well, the file stays as the main worker wrote it.

        Raises:
            OSError: the file cannot be written.
        """
        written = _read(folder)
        if written.get("exit_code") == self.exit_code and self.error is None:
            return
        result = {
            **UNKNOWN,
            "world_size": self.workers,
            "seconds": round(self.seconds, 3),
            **folder.mended(),
            **written,
        }
        result["weights_sha256"] = result["weights_sha256"] or self.digest or None
        folder.write_result({**result, "exit_code": self.exit_code, "error": self.error})


def digest_in(folder: RunFolder) -> str:
    """The digest of the weights, if the main worker has written that training is complete; otherwise empty."""
    digest = _read(folder).get("weights_sha256")
    return digest if isinstance(digest, str) else ""


def conclude(folder: RunFolder, outcome: Outcome, terminal: Terminal) -> Outcome:
    """Write a job's end into its run folder.

    Returns:
        the outcome; a job that ended well, but whose ``result.json`` could not be written, counts as failed.
    """
    if outcome.exit_code == 0 and outcome.has_main and _lacks_steps(folder):
        path = folder.path / "result.json"
        outcome = _without_result(outcome, f"the main worker could not write {path}, which lacks what it alone knows")
    why = write_end(folder, JobEnd.of(outcome), terminal)
    return _without_result(outcome, why) if why and outcome.exit_code == 0 else outcome


def _without_result(outcome: Outcome, why: str) -> Outcome:
    weights = f": weights sha256 {outcome.digest}" if outcome.digest else ""
    return replace(outcome, conclusion=JobConclusion(1, f"{COMPLETE}{weights}; but {why}"))


def _lacks_steps(folder: RunFolder) -> bool:
    try:
        return _read(folder).get("steps") is None
    except OSError:  # then it cannot be written either, and write_end reports that
        return False


def write_end(folder: RunFolder, end: JobEnd, terminal: Terminal) -> str:
    """Write a job's end into its run folder; if that cannot be done, say why not.

    Returns:
        what is missing, for people; nothing if all is written, or if the job goes on elsewhere.
    """
    path = folder.path / "result.json"
    try:
        end.write(folder)
    except (OSError, Superseded) as error:
        terminal.say(f"{path} could not be written: {error}")
        return f"{path} could not be written" if isinstance(error, OSError) else ""
    return ""


def _read(folder: RunFolder) -> dict[str, Any]:
    try:
        result = folder.read_result()
    except ValueError:  # another program wrote it: it is replaced
        return {}
    return result if isinstance(result, dict) else {}
