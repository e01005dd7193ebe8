"""The outcome of a job: the worker to blame, the exit code, and the message. Nothing here touches the system."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from unisono.errors import FIRST_SIGNAL, PREEMPTED
from unisono.launch.ending.failure import Failure
from unisono.launch.terminal.terminal import WorkerName, called, number

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
NOT_MISSED = f"{COMPLETE}, and it is not missed"
LINES = (
    "What the script does after run.finish may be missing: if the job has written checkpoints, start it again with the "
    "same --run-dir, and it goes on from the last one"
)


def after_training(digest: str) -> str:
    """What people are told of a failure after training; nothing without the digest of its weights."""
    return f"; {COMPLETE}: weights sha256 {digest}. {LINES}" if digest else ""


class Blame(IntEnum):
    """The role of an exit in the job's end, the likeliest cause first."""

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
        failure: the exception that ended its script, if one did.
        told_at: the time at which the launcher, ending the job, told it to end; None if it did not.
        peak_mib: the most memory that it was seen to need, in MiB; None if nobody looked.
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
        """When the trouble began: the exception comes before the exit."""
        return min(self.time, self.failure.time) if self.failure else self.time

    @property
    def had_ended(self) -> bool:
        """Whether its script had ended already when the launcher told it to end, and it was on its way out."""
        return self.told_at is not None and self.began < self.told_at

    @property
    def shell_code(self) -> int:
        """The exit code as a shell gives it; its own, if the launcher ended it while it was on its way out."""
        if self.had_ended and self.failure is not None:
            return self.failure.exit_code
        return self.code if self.code >= 0 else FIRST_SIGNAL - self.code

    @property
    def signal_name(self) -> str:
        """The signal that ended it, or nothing."""
        if self.code >= 0:
            return ""
        try:
            return signal.Signals(-self.code).name
        except ValueError:  # a real-time signal has no name
            return f"signal {-self.code}"

    def blame(self, interrupted: int | None = None) -> Blame:
        """How likely this exit began it all, in a job that was or was not interrupted by a signal."""
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
    """The end of a job, where no worker of this host is to blame.

    Attributes:
        exit_code: the exit code for the launcher.
        reason: the reason, as a sentence for people.
    """

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job.

    Attributes:
        exits: the end of each worker.
        workers: the number of workers that the job was to have.
        host: the name of the host.
        seconds: the duration of the job, in seconds.
        interrupted: the first signal that the launcher got, if any.
        conclusion: the end of the job where the workers' exits do not decide it, such as the coordinator's word for an
            elastic job; else None.
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
        """The exit that began it all; None if no worker failed by itself."""
        return find_cause(self.exits, self.interrupted)

    @property
    def exit_code(self) -> int:
        """The launcher's own exit code."""
        cause, codes = self.cause, {each.code for each in self.exits}
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
            if self.interrupted is not None and all(each.code != PREEMPTED for each in self.exits):
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
        """That training was complete when the job failed, for people; else nothing."""
        return "" if self.exit_code == 0 else after_training(self.digest)

    @property
    def reason(self) -> str:
        """What went wrong, without who it was: the same for jobs that fail in the same way."""
        cause = self.cause
        failure = None if cause is None else cause.failure
        if failure is not None:
            return f"{failure.type}: {failure.message}"
        return self.summary() if cause is None else cause.signal_name or f"exit code {cause.code}"

    @property
    def note(self) -> str:
        """Whom to look at when a worker was missed, but none says why: those that ended without a word."""
        cause = self.cause
        if cause is None or cause.failure is None or not cause.failure.consequence:
            return ""
        silent = [
            f"{called(each.rank)} {'was ended by the launcher' if each.told_at else f'left with exit code {each.code}'}"
            for each in self.exits
            if each.failure is None
        ]
        return f" (no error came from the worker that was missed: {', '.join(silent)})" if silent else ""

    def _is_to_blame(self, cause: WorkerExit) -> bool:
        """In an interrupted job only a failure of a worker's own counts."""
        return self.interrupted is None or cause.blame(self.interrupted) is Blame.CAUSE


def find_cause(exits: Sequence[WorkerExit], interrupted: int | None = None) -> WorkerExit | None:
    """The exit that began it all: by blame, then the earliest; None if every worker ended well."""
    failed = [each for each in exits if each.blame(interrupted) is not Blame.NONE]
    return min(failed, key=lambda each: (each.blame(interrupted), each.began, number(each.rank)), default=None)


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
