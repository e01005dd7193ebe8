"""The run folder: the files that a run writes for people and programs."""

import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.checkpoint.writer import Hold, Writer, describe_holder, newest_term
from unisono.errors import JobError, LaunchError, Superseded, Unreadable
from unisono.host.tracebacks import warn
from unisono.jsonl import append_line, open_lines, raw_lines, read_lines, to_json
from unisono.received import parse_json, read_object

CURVATURE_REQUEST, CURVATURE_RESULT = "asked.json", "found.json"
"""The files with the request of ``unisono curvature`` to workers, and with the result of their measurement."""

UNNAMED = "unnamed state"
"""The journal's event for state beside the model that the run does not keep."""

UNPROVEN = "by a fault of the memory, or by what the script does on some workers only"
"""The reason why workers' states differ where no worker finds a fault in its own memory."""


class RunFolder:
    """``job.json``, ``journal.jsonl``, ``metrics.jsonl``, ``checkpoints/``, ``logs/`` and ``result.json``.

    Files, and the folder itself, are made when they are first written; a worker that only opens a folder leaves no
    trace. If a line cannot be written during a run (a full disk, say), a warning says so, and the line is left out: no
    run ends because of its journal.

    Args:
        path: the absolute path, so that the script may change its working directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.metrics = MetricsFile(self.path / "metrics.jsonl", self._obstacle)
        self.writer: Writer | None = None
        self._hold: Hold | None = None

    def written_by(self, writer: Writer) -> None:
        """Write from now on only as long as this writer has the right to."""
        self.writer = writer

    def _obstacle(self) -> str:
        return "" if self.writer is None else self.writer.obstacle()

    def ready(self, timeout_s: float) -> None:
        """Wait until results can be written.

        Raises:
            LaunchError: they still cannot after this time; says why.
            Superseded: the job goes on without this worker.
        """
        if self.writer is not None and (why := self.writer.wait(timeout_s)):
            raise LaunchError(f"{why}: {self.path} has no result of this worker")

    @property
    def term(self) -> int:
        """The number of the newest start of a job in this folder; 0 before the first."""
        return newest_term(self.path) if self._hold is None else self._hold.term

    def hold(self) -> None:
        """Make the folder if there is none, and keep other starts of a job out of it until it is closed.

        Raises:
            JobError: another start has it; says which process, on which host, since when. Nothing was changed.
            OSError: it cannot be made, or written to.
        """
        if self._hold is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold = Hold(self.path)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of the workers' output."""
        return self.path / "logs"

    def log_of(self, worker: int | str) -> Path:
        """The file with the output of one worker, named by its rank, or by its id where ranks change."""
        return self.logs / f"{_file_of(worker)}.log"

    def error_of(self, worker: int | str) -> Path:
        """The file with the error that ended one worker."""
        return self.logs / f"{_file_of(worker)}.error.json"

    def ended_of(self, worker: int | str) -> Path:
        """The file with the exit code of one worker's script, written when the script has ended."""
        return self.logs / f"{_file_of(worker)}.ended"

    def read_job(self) -> dict[str, Any] | None:
        """The job that this folder belongs to; None for a new folder.

        Raises:
            JobError: ``job.json`` is damaged.
        """
        return _read(self.path / "job.json")

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Write ``job.json``, which makes this the folder of a job.

        Raises:
            JobError: nothing can be written here; says why.
        """
        try:
            write_json(self.path / "job.json", job)
        except OSError as error:
            raise JobError(f"{self.path} cannot be a run folder: {error}; choose another one with run_dir=") from error

    def read_result(self) -> dict[str, Any] | None:
        """Read ``result.json``; None while there is no such file.

        Raises:
            JobError: ``result.json`` is damaged.
        """
        return _read(self.path / "result.json")

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json``, unless another start or generation writes here, or may do so.

        Raises:
            OSError: the file cannot be written.
            Superseded: another start or generation writes here.
        """
        path = self.path / "result.json"
        if self._hold is not None and newest_term(self.path) > self._hold.term:
            raise Superseded(f"{path} is another start's: {describe_holder(self.path)}")
        if self.writer is not None:
            if self.writer.obstacle():
                return
            result = {**result, **self.writer.about}
        write_json(path, result)

    def journal(self, event: str, **fields: Any) -> None:
        """Append an event with the present time. The line is written whole, and at once."""
        if self.writer is not None and self.writer.is_superseded:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        path = self.path / "journal.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_lines(path)
            try:
                append_line(descriptor, {"time": now, "event": event, **fields})
            finally:
                os.close(descriptor)
        except OSError as error:
            warn_unwritten(path, error)

    def has_event(self, event: str, fields: Mapping[str, Any]) -> bool:
        """Whether the journal has a line of this event with these fields."""
        expected = parse_json(to_json({"event": event, **fields}))  # as values of JSON, such as lists for tuples
        return any(all(line.get(name) == value for name, value in expected.items()) for line in self._events())

    def mended(self) -> dict[str, list[dict[str, Any]]]:
        """Return the journal's lines about wrong states: states that were healed, steps to which the run went back."""
        events = self._events()
        return {
            name: [
                {key: line.get(key) for key in fields}
                for line in events
                if line.get("event") == event and line.get("fault") is not False
            ]
            for name, event, fields in (
                ("healed", "healed", ("step", "what", "ranks", "hosts")),
                ("rolled_back", "rolled back", ("step", "to", "why", "proven")),
                ("wrong_results", "wrong result", ("step", "shard", "rank", "host", "transient")),
            )
        }

    @property
    def unnamed_states(self) -> list[str]:
        """What the journal says of state that the run does not keep, and by which bits may go, in sentences."""
        return [str(line.get("why")) for line in self._events() if line.get("event") == UNNAMED and line.get("breaks")]

    def _events(self) -> list[dict[str, Any]]:
        try:
            return read_lines(self.path / "journal.jsonl")
        except (OSError, Unreadable):  # there is no journal yet, or a warning about it was given when it was written
            return []

    def close(self) -> None:
        """Close all files, and release the folder for other starts."""
        self.metrics.close()
        if self._hold is not None:
            self._hold.release()
            self._hold = None


class MetricsFile:
    """A file of JSON lines, each written at once, so that none is lost if the worker is killed.

    Args:
        obstacle: a function that returns why nothing may be written now, or an empty text. Lines wait until then.
    """

    def __init__(self, path: Path, obstacle: Callable[[], str] = lambda: "") -> None:
        self.path, self._obstacle = path, obstacle
        self._descriptor: int | None = None
        self._pending: list[dict[str, Any]] = []

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line. NaN and infinities, which JSON does not have, become null.

        Raises:
            Superseded: the job goes on without this worker.
        """
        self._pending.append(dict(line))
        if self._obstacle():
            return
        pending, self._pending = self._pending, []
        try:
            for line in pending:
                if self._descriptor is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._descriptor = open_lines(self.path)
                append_line(self._descriptor, line)
        except OSError as error:
            warn_unwritten(self.path, error)

    def truncate_after(self, step: int) -> list[dict[str, Any]]:
        """Remove incomplete lines and the lines of steps after ``step``, which a run that resumes writes again.

        Return the lines that stay.

        Raises:
            JobError: the file cannot be read; says what to do.
            Superseded: the job goes on without this worker.
        """
        self._obstacle()
        self.close()
        try:
            lines = [line.splitlines()[0] for line in raw_lines(self.path)]
        except (OSError, Unreadable) as error:
            raise JobError(f"{self.path} cannot be read: {error}; remove it, or use another run folder") from error
        kept = [line for line in lines if _belongs(line, step)]
        if lines:
            _replace(self.path, b"".join(line + b"\n" for line in kept))
        return [parse_json(line) for line in kept]

    def close(self) -> None:
        """Close the file; writing opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None  # even if closing fails, it is not closed twice
            os.close(descriptor)


def new_run_folder(base: Path, stem: str) -> Path:
    """Make ``base/<time>-<stem>``, followed by a number if two runs start in one second.

    Raises:
        JobError: it cannot be made; says why.
    """
    name = f"{datetime.now(UTC).astimezone():%Y%m%d-%H%M%S}-{stem}"
    number = 1
    while True:
        path = base / (name if number == 1 else f"{name}-{number}")
        try:
            base.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError as error:
            if not path.exists():
                raise _no_folder(base, error) from error
            number += 1
        except OSError as error:
            raise _no_folder(base, error) from error
        else:
            return path


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: a reader sees the old content or the new."""
    _replace(path, to_json(value, indent=2))


def _file_of(worker: int | str) -> str:
    return f"rank-{worker}" if isinstance(worker, int) else worker


def _no_folder(base: Path, error: OSError) -> JobError:
    return JobError(f"no run folder can be made in {base.absolute()}: {error}; choose one with --run-dir or run_dir=")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, Unreadable) as error:
        raise JobError(f"{path} cannot be read: {error}; restore it, or use another run folder") from None


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(temporary, "wb", opener=_no_link) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _belongs(line: bytes, step: int) -> bool:
    try:
        value = parse_json(line)
    except ValueError:
        return False
    if not isinstance(value, dict):
        return False
    line_step = value.get("step")
    return not isinstance(line_step, int) or line_step <= step


def warn_unwritten(path: Path, error: OSError) -> None:
    """Warn that a file of the run is incomplete, and that the run goes on."""
    warn(f"{path} is incomplete: {error}. The run goes on")
