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

UNPROVEN = "by a fault of the memory, or by what the script does on some workers only"
"""The reason why workers' states differ where no worker finds a fault in its own memory."""


class RunFolder:
    """``job.json``, ``journal.jsonl``, ``metrics.jsonl``, ``checkpoints/``, ``logs/`` and ``result.json``.

    Files, and the folder itself, are made when they are first written; opening a folder on a worker that writes
    nothing leaves no trace. What cannot be written while a run is under way (a full disk, say) is warned of and
    left out: no run ends for want of a line in its journal.

    Args:
        path: the absolute path, so that the script may change its working directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.metrics = MetricsFile(self.path / "metrics.jsonl", self._obstacle)
        self.writer: Writer | None = None
        self._hold: Hold | None = None

    def written_by(self, writer: Writer) -> None:
        """Let a worker write here from now on, as long as it has the right to."""
        self.writer = writer

    def _obstacle(self) -> str:
        return "" if self.writer is None else self.writer.obstacle()

    def ready(self, timeout_s: float) -> None:
        """Wait until results can be written.

        Raises:
            LaunchError: they cannot for so long; says why.
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
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Where the workers' output is."""
        return self.path / "logs"

    def log_of(self, worker: int | str) -> Path:
        """The output of one worker, named by its rank, or by its id where ranks change."""
        return self.logs / f"{_file_of(worker)}.log"

    def error_of(self, worker: int | str) -> Path:
        """The error that ended one worker, named in the same way."""
        return self.logs / f"{_file_of(worker)}.error.json"

    def ended_of(self, worker: int | str) -> Path:
        """The exit code of one worker's script, there once nothing of the script is left to do."""
        return self.logs / f"{_file_of(worker)}.ended"

    def read_job(self) -> dict[str, Any] | None:
        """The job that this folder belongs to; None for a new folder.

        Raises:
            JobError: ``job.json`` is damaged.
        """
        return _read(self.path / "job.json")

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Make this the folder of a job.

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
        """Say how the run ended; unless another start or generation writes here, or may be writing.

        Raises:
            OSError: the file cannot be written.
            Superseded: another one does.
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
        """Append an event with the time it happened. A line is written at once and whole."""
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
        wanted = parse_json(to_json({"event": event, **fields}))
        return any(all(line.get(name) == value for name, value in wanted.items()) for line in self._events())

    def mended(self) -> dict[str, list[dict[str, Any]]]:
        """Return the journal's lines about wrong states: which workers got the right state, when the run went back."""
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

    def _events(self) -> list[dict[str, Any]]:
        try:
            return read_lines(self.path / "journal.jsonl")
        except (OSError, Unreadable):  # what could not be written either was warned of
            return []

    def close(self) -> None:
        """Close all files, and let other starts have the folder."""
        self.metrics.close()
        if self._hold is not None:
            self._hold.release()
            self._hold = None


class MetricsFile:
    """A file of JSON lines, each written at once: a worker that is killed takes none with it.

    Args:
        obstacle: a function that returns why nothing may be written now, or an empty text. Lines wait until they may.
    """

    def __init__(self, path: Path, obstacle: Callable[[], str] = lambda: "") -> None:
        self.path, self._obstacle = path, obstacle
        self._descriptor: int | None = None
        self._waiting: list[dict[str, Any]] = []

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line. NaN and infinities, which JSON does not have, become null.

        Raises:
            Superseded: the job goes on without this worker.
        """
        self._waiting.append(dict(line))
        if self._obstacle():
            return
        waiting, self._waiting = self._waiting, []
        try:
            for line in waiting:
                if self._descriptor is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._descriptor = open_lines(self.path)
                append_line(self._descriptor, line)
        except OSError as error:
            warn_unwritten(self.path, error)

    def truncate_after(self, step: int) -> list[dict[str, Any]]:
        """Drop a torn line, and every line of a step beyond ``step``: a run that resumes writes them again.

        Return the lines that stay.

        Raises:
            JobError: the file is none that could be read; says what to do.
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
            descriptor, self._descriptor = self._descriptor, None  # also where closing it fails
            os.close(descriptor)


def new_run_folder(base: Path, stem: str) -> Path:
    """Make ``base/<time>-<stem>``, with a number behind it if two runs start in one second.

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
    """Write a JSON file in one piece: a reader sees the old one or the new one."""
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
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(beside, "wb", opener=_no_link) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _belongs(line: bytes, step: int) -> bool:
    try:
        value = parse_json(line)
    except ValueError:
        return False
    if not isinstance(value, dict):
        return False
    its_step = value.get("step")
    return not isinstance(its_step, int) or its_step <= step


def warn_unwritten(path: Path, error: OSError) -> None:
    """Tell that a file of the run lacks something, and that the run goes on."""
    warn(f"{path} is incomplete: {error}. The run goes on")
