"""The last words of a launcher: what went wrong, and where to look."""

from pathlib import Path

from unisono.checkpoint.folder import RunFolder
from unisono.launch.ending.outcome import Blame, Outcome, describe
from unisono.launch.terminal.name import called

TAIL_LINES = 15
TAIL_BYTES = 16 * 1024


def report(outcome: Outcome, folder: RunFolder) -> str:
    """What to print when a job has ended: what was mended, and after a failure the cause's traceback last."""
    return mended(folder) + _failure(outcome, folder)


def mended(folder: RunFolder) -> str:
    """Lines about faults of memory and processors in the life of a run folder; nothing if there were none."""
    found = folder.mended()
    healed, rolled_back = len(found["healed"]), len(found["rolled_back"])
    wrong = {f"rank {one['rank']} on host {one['host']}": None for one in found["wrong_results"]}
    named = f"unisono: {', '.join(wrong)} computed wrongly, as an audit found\n" if wrong else ""
    if not healed + rolled_back:
        return named
    return named + (
        f"unisono: faults of the memory were found and mended: {healed} healed, {rolled_back} rolled back; "
        f"{folder.path / 'result.json'} lists them\n"
    )


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
