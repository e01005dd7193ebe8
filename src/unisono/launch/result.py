"""The launcher's share of the run folder: logs, and a ``result.json`` that tells the job's end, not one worker's."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import JobError
from unisono.launch.outcome import Outcome

UNKNOWN: Mapping[str, Any] = {"weights_sha256": None, "steps": None, "samples": None}
"""What only the main worker can tell."""


def prepare_folder(run_dir: Path) -> None:
    """Make the run folder, and take away what an earlier start of this job left about its end.

    Raises:
        JobError: the folder cannot be made or written to.
    """
    logs = run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for stale in (run_dir / "result.json", *logs.glob("rank-*.error.json")):
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise JobError(f"the run folder {run_dir} cannot be used: {error}; name another with --run-dir") from error


def log_path(run_dir: Path, rank: int) -> Path:
    """Where everything that a rank writes is kept."""
    return run_dir / "logs" / f"rank-{rank}.log"


@dataclass(frozen=True, slots=True)
class End:
    """What a launcher knows of a job's end.

    Attributes:
        exit_code: the launcher's own.
        error: what went wrong; None if nothing did.
        workers: how many there were to be.
        seconds: from the first start to the last end.
    """

    exit_code: int
    error: Mapping[str, object] | None
    workers: int
    seconds: float

    @classmethod
    def of(cls, outcome: Outcome) -> "End":
        """The end of a job that was started."""
        return cls(outcome.exit_code, outcome.error, outcome.workers, outcome.seconds)

    def write(self, run_dir: Path) -> None:
        """Write ``result.json``. What the main worker has written there is kept, save exit code and error.

        A main worker that finished well, in a job that ended well, has the last word on everything.

        Raises:
            OSError: the file cannot be written.
        """
        path = run_dir / "result.json"
        written = _read(path)
        if written.get("exit_code") == self.exit_code and self.error is None:
            return
        whole = {**UNKNOWN, "world_size": self.workers, "seconds": round(self.seconds, 3), **written}
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            unfinished.write_text(
                json.dumps(whole | {"exit_code": self.exit_code, "error": self.error}, indent=1) + "\n"
            )
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # none, or none that can be used: it is replaced
        return {}
    return found if isinstance(found, dict) else {}
