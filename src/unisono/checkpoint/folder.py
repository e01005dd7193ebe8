"""The run folder: what a run leaves behind for people and programs to read."""

import json
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO


class RunFolder:
    """``job.json``, ``journal.jsonl``, ``metrics.jsonl``, ``checkpoints/``, ``logs/`` and ``result.json``.

    Files are made when they are first written; opening a folder on a worker that writes nothing leaves no trace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.metrics = MetricsFile(self.path / "metrics.jsonl")

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Where the workers' output is."""
        return self.path / "logs"

    def log_of(self, rank: int) -> Path:
        """The output of one worker."""
        return self.logs / f"rank-{rank}.log"

    def error_of(self, rank: int) -> Path:
        """The error that ended one worker."""
        return self.logs / f"rank-{rank}.error.json"

    def read_job(self) -> dict[str, Any] | None:
        """The job that this folder belongs to; None for a new folder."""
        path = self.path / "job.json"
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Make this the folder of a job."""
        write_json(self.path / "job.json", job)

    def read_result(self) -> dict[str, Any] | None:
        """What ``result.json`` says; None while there is none."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Say how the run ended."""
        write_json(self.path / "result.json", result)

    def journal(self, event: str, **fields: Any) -> None:
        """Append an event with the time it happened. A line is written at once and whole."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **fields}) + "\n"
        descriptor = os.open(self.path / "journal.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Write out what is buffered."""
        self.metrics.close()


class MetricsFile:
    """A file of JSON lines that survives being cut off in the middle of a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; it reaches the disk when the buffer is full, or at the next :meth:`flush`."""
        self._open().write((json.dumps(line) + "\n").encode())

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if self._file is not None:
            self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop a torn last line, and every line of a step beyond ``step``: a run that resumes writes them again."""
        self.close()
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_bytes().splitlines(keepends=True) if _belongs(line, step)]
        _replace(self._path, b"".join(kept))

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = self._path.open("ab")
            if self._file.tell() and not self._path.read_bytes().endswith(b"\n"):
                self._file.write(b"\n")
        return self._file


def new_run_folder(base: Path, stem: str) -> Path:
    """Make ``base/<time>-<stem>``, with a number behind it if two runs start in one second."""
    base.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.now(UTC).astimezone():%Y%m%d-%H%M%S}-{stem}"
    number = 1
    while True:
        path = base / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in one piece: a reader sees the old one or the new one."""
    _replace(path, (json.dumps(value, indent=2) + "\n").encode())


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _belongs(line: bytes, step: int) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(found, dict) and found.get("step", 0) <= step
