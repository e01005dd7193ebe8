"""The launcher's share of the run folder: logs, and a ``result.json`` that tells the job's end, not one worker's."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.checkpoint.folder import UNPROVEN, RunFolder, new_run_folder
from unisono.errors import JobError, Superseded, Unreadable
from unisono.jsonl import read_lines
from unisono.launch.ending.outcome import COMPLETE, Blame, JobConclusion, Outcome, WorkerExit, describe
from unisono.launch.terminal.terminal import Terminal, called

# The last words of a launcher: what went wrong, and where to look.

TAIL_LINES = 15
TAIL_BYTES = 16 * 1024


def report(outcome: Outcome, folder: RunFolder) -> str:
    """What to print when a job has ended: what was mended, and after a failure the cause's traceback last."""
    return mended(folder) + _failure(outcome, folder)


def mended(folder: RunFolder) -> str:
    """Lines about what was mended in the life of a run folder; nothing if nothing was."""
    found = folder.mended()
    healed, back = len(found["healed"]), len(found["rolled_back"])
    proven = sum(one["proven"] is True for one in found["rolled_back"])
    wrong = {f"rank {one['rank']} on host {one['host']}": None for one in found["wrong_results"]}
    said = [f"{', '.join(wrong)} computed wrongly, as an audit found"] if wrong else []
    lists = f"{folder.path / 'result.json'} lists them"
    if proven:
        said.append(f"faults of memory or processors were found and mended: {proven} rolled back; {lists}")
    if healed + back > proven:
        said.append(
            f"the states of workers differed, {UNPROVEN}: {healed} healed, {back - proven} rolled back; {lists}"
        )
    return "".join(f"unisono: {one}\n" for one in said)


def _failure(outcome: Outcome, folder: RunFolder) -> str:
    if outcome.exit_code == 0:
        return ""
    cause = outcome.cause
    if cause is None or cause.shell_code != outcome.exit_code or cause.blame(outcome.interrupted) > Blame.CONSEQUENCE:
        return f"unisono: {outcome.summary()} (exit code {outcome.exit_code}, run folder {folder.path})\n"
    log = folder.log_of(cause.rank)
    if cause.failure is not None:
        who = f"{called(cause.rank)} on host {outcome.host} failed"
        words = f"{who} (exit code {outcome.exit_code}, log {log}){outcome.note}{outcome.trained}"
        return f"unisono: {words}\n{cause.failure.traceback}"
    tail = "".join(f"  | {line}\n" for line in last_lines(log))
    quoted = f"unisono: the last lines of {called(cause.rank)} (log {log}):\n{tail}" if tail else ""
    return f"{quoted}unisono: {describe(cause, outcome.host)}{outcome.trained} (exit code {outcome.exit_code})\n"


def in_a_line(outcome: Outcome, folder: RunFolder) -> tuple[str, Path]:
    """What went wrong, and the file or folder where there is more."""
    words, cause = outcome.summary(), outcome.cause
    if cause is None:
        return words, folder.logs
    log = folder.log_of(cause.rank)
    if cause.failure is None:  # what it printed is all there is
        words = "; ".join([words, *last_lines(log, 1)])
    return words, log


def last_lines(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The end of a log; nothing if it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


# Which injected faults have ended workers: a kill that somebody ordered is no memory that ran out.

KINDS = {-signal.SIGKILL: "kill", -signal.SIGTERM: "leave"}
"""Faults that end a worker, by the exit code that it has then."""


def with_faults(exits: Sequence[WorkerExit], folder: RunFolder) -> tuple[WorkerExit, ...]:
    """The same exits; those of workers that a fault has ended say which, as far as the folder's journal knows."""
    if not any(each.code in KINDS for each in exits):
        return tuple(exits)
    injected = {}
    for line in _journal(folder):
        if line.get("event") == "fault" and isinstance(line.get("pid"), int) and isinstance(line.get("kind"), str):
            words = f"injected fault {line.get('number')} ({line.get('kind')}), at step {line.get('step')}"
            injected[line.get("pid"), line.get("kind")] = words
    return tuple(replace(each, fault=injected.get((each.pid, KINDS.get(each.code)), "")) for each in exits)


def _journal(folder: RunFolder) -> list[dict[str, Any]]:
    try:
        return read_lines(folder.path / "journal.jsonl")
    except (OSError, Unreadable):
        return []


RUNS = Path("runs")
"""Where run folders are made for those who name none."""

UNKNOWN: Mapping[str, Any] = {"weights_sha256": None, "steps": None, "samples": None}
"""What only the main worker can tell."""


def open_folder(wanted: Path | None, stem: str) -> RunFolder:
    """The run folder that the person named, or a new one; without what an earlier start said about its end.

    It is held until it is closed: nobody else can start a job in it.

    Raises:
        JobError: another start has the folder, or it cannot be made or written to; says which, and what to do.
    """
    try:
        folder = RunFolder(wanted or new_run_folder(RUNS, stem))
        folder.hold()
        folder.logs.mkdir(parents=True, exist_ok=True)
        ends = (*folder.logs.glob("*.error.json"), *folder.logs.glob("*.ended"))
        for stale in (folder.path / "result.json", *ends):
            stale.unlink(missing_ok=True)
    except OSError as error:
        where = wanted or RUNS.absolute()
        raise JobError(f"the run folder {where} cannot be used: {error}; name another with --run-dir") from error
    return folder


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job, as its launcher knows it.

    Attributes:
        exit_code: the exit code of the launcher.
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
        """The end of a job that was started."""
        return cls(outcome.exit_code, outcome.error, outcome.workers, outcome.seconds, outcome.digest)

    def write(self, folder: RunFolder) -> None:
        """Write ``result.json``. What the main worker has written there is kept, save exit code and error.

        A main worker that finished well, in a job that ended well, has the last word on everything.

        Raises:
            OSError: the file cannot be written.
        """
        written = _read(folder)
        if written.get("exit_code") == self.exit_code and self.error is None:
            return
        whole = {**UNKNOWN, "world_size": self.workers, "seconds": round(self.seconds, 3), **folder.mended(), **written}
        whole["weights_sha256"] = whole["weights_sha256"] or self.digest or None
        folder.write_result({**whole, "exit_code": self.exit_code, "error": self.error})


def digest_in(folder: RunFolder) -> str:
    """That of the weights, if the main worker has written that training is complete; else nothing."""
    found = _read(folder).get("weights_sha256")
    return found if isinstance(found, str) else ""


def conclude(folder: RunFolder, outcome: Outcome, terminal: Terminal) -> Outcome:
    """Write a job's end into its run folder.

    Returns:
        the outcome; a job that ended well and cannot say so has failed, since a reader of ``result.json`` cannot know.
    """
    if outcome.exit_code == 0 and outcome.has_main and _lacks_steps(folder):
        path = folder.path / "result.json"
        outcome = _unable_to_say(outcome, f"the main worker could not write {path}, which lacks what it alone knows")
    unwritten = write_end(folder, JobEnd.of(outcome), terminal)
    return _unable_to_say(outcome, unwritten) if unwritten and outcome.exit_code == 0 else outcome


def _unable_to_say(outcome: Outcome, why: str) -> Outcome:
    weights = f": weights sha256 {outcome.digest}" if outcome.digest else ""
    return replace(outcome, conclusion=JobConclusion(1, f"{COMPLETE}{weights}; but {why}"))


def _lacks_steps(folder: RunFolder) -> bool:
    try:
        return _read(folder).get("steps") is None
    except OSError:  # nor can it be written, as is found out next
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
        found = folder.read_result()
    except ValueError:  # not the project's: it is replaced
        return {}
    return found if isinstance(found, dict) else {}
