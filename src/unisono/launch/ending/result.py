"""The launcher's share of the run folder: logs, and a ``result.json`` that tells the job's end, not one worker's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.folder import RunFolder, new_run_folder
from unisono.errors import JobError, Superseded
from unisono.launch.ending.outcome import Outcome
from unisono.launch.terminal.terminal import Terminal

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
class End:
    """What a launcher knows of a job's end.

    Attributes:
        exit_code: the launcher's own.
        error: what went wrong; None if nothing did.
        workers: how many there were to be.
        seconds: from the first start to the last end.
        digest: of the weights, if training is complete; a main worker on another host writes its own there.
    """

    exit_code: int
    error: Mapping[str, object] | None
    workers: int
    seconds: float
    digest: str = ""

    @classmethod
    def of(cls, outcome: Outcome) -> "End":
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


def conclude(folder: RunFolder, end: End, terminal: Terminal) -> None:
    """Write a job's end into its run folder; if that cannot be done, say so."""
    try:
        end.write(folder)
    except (OSError, Superseded) as error:
        terminal.say(f"{folder.path / 'result.json'} could not be written: {error}")


def _read(folder: RunFolder) -> dict[str, Any]:
    try:
        found = folder.read_result()
    except ValueError:  # not the project's: it is replaced
        return {}
    return found if isinstance(found, dict) else {}
