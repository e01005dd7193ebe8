"""The coordinator's state on disk, and its lines in the journal: files of JSON lines."""

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from unisono.errors import JobError
from unisono.host.tracebacks import warn_without_script
from unisono.jsonl import append_line, open_lines, read_lines, to_json
from unisono.membership.state.state import REPORTED_AGAIN, Agent, State, Worker
from unisono.received import parse_json

Plain = dict[str, Any]
Rows = Mapping[str, Iterable[str]]
"""The ids of rows, by the name of their table."""

_STATE: TypeAdapter[State] = TypeAdapter(State)
_ROWS: dict[str, TypeAdapter[Any]] = {"workers": TypeAdapter(Worker), "agents": TypeAdapter(Agent)}
_TYPES = get_type_hints(State)
_FIELDS: dict[str, TypeAdapter[Any]] = {
    field.name: TypeAdapter(_TYPES[field.name])
    for field in fields(State)
    if field.name not in {*_ROWS, *REPORTED_AGAIN}
}


def plain_state(state: State) -> Plain:
    """A whole state as plain values, without what workers and agents send again when they connect."""
    plain: Plain = {name: adapter.dump_python(getattr(state, name), mode="json") for name, adapter in _FIELDS.items()}
    for name in _ROWS:
        plain[name] = {row.id: _plain_row(name, row) for row in getattr(state, name).values()}
    return plain


def plain_changes(before: State, after: State, rows: Rows) -> Plain:
    """The changes from one state to a later one, as plain values."""
    plain: Plain = {}
    for name, adapter in _FIELDS.items():
        new = getattr(after, name)
        if new is not getattr(before, name) and new != getattr(before, name):
            plain[name] = adapter.dump_python(new, mode="json")
    for name, ids in rows.items():
        table = getattr(after, name)
        plain[name] = {row_id: _plain_row(name, table[row_id]) if row_id in table else None for row_id in sorted(ids)}
    return plain


def merge(state: Plain, new: Plain) -> None:
    """Apply changes to a state in place.

    Args:
        state: a state in the form of :func:`plain_state`; if it was read from a file, it may be damaged.
        new: changes in the form of :func:`plain_changes`, likewise.
    """
    for name, value in new.items():
        if name not in _ROWS:
            state[name] = value
            continue
        table = state.setdefault(name, {})
        if not isinstance(table, dict) or not isinstance(value, dict):
            raise JobError(f"its {name} are damaged; remove it to begin anew")
        for row_id, row in value.items():
            if row is None:
                table.pop(row_id, None)
            else:
                table[row_id] = row


def state_of(plain: Plain) -> State:
    """A state from plain values.

    Raises:
        JobError: the values are no state of this version.
    """
    try:
        return _STATE.validate_json(json.dumps(plain))
    except (ValidationError, RecursionError) as error:
        raise JobError("another version of Unisono wrote it; remove it to begin anew") from error


def _plain_row(table: str, row: Any) -> Any:
    return _ROWS[table].dump_python(row, mode="json", exclude={"signs"})


# The coordinator's lines in the run folder's journal, which the workers write as well.


class Journal:
    """Appends events with their times to a file of JSON lines.

    If a line cannot be written, it warns and goes on: no job ends because of its journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def line(self, event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The line of an event that happens now."""
        return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines, each of them whole."""
        try:
            descriptor = open_lines(self._path)
            try:
                for line in lines:
                    append_line(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            warn_without_script(f"{self._path} is incomplete: {error}. The job goes on")

    def complete(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append those of the lines that are missing, since an earlier coordinator was killed before it wrote them."""
        present = read_lines(self._path)
        self.append(line for line in lines if line not in present)


# The coordinator's state on disk: JSON lines that are appended, and from time to time written anew.

SMALL = 2**20  # bytes

OWN = 0o600
"""The permissions of the file: only its owner may read and write it."""

GROWTH = 4
"""The file is written anew when it is so many times as large as after the last time."""

EntrySource = Callable[[], Iterable[Mapping[str, Any]]]
"""A function that returns entries with the whole present state."""


class StateLog:
    """A file of entries, which only one process at a time may keep open.

    If an entry cannot be written (the disk is full, say), it warns and goes on: training needs the file only for a
    coordinator that starts again.

    Args:
        path: the file's path. Its folder exists.
        all_entries: a function that returns entries with the whole present state.
        small: the size in bytes up to which the file is never written anew.

    Raises:
        JobError: another process has it open, or it cannot be opened.
    """

    def __init__(self, path: Path, all_entries: EntrySource, small: int = SMALL) -> None:
        self._path = path
        self._all_entries = all_entries
        self._small = small
        self._lock = _lock(path.parent)
        try:
            self._descriptor = open_lines(path, OWN)
        except OSError as error:
            os.close(self._lock)
            raise JobError(f"{path} cannot be written: {error}") from error
        self._compact_size = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The entries in order. Lines that were cut off, or are damaged, are left out."""
        for line in self._path.read_bytes().splitlines():
            try:
                entry = parse_json(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry

    def append(self, entry: Mapping[str, Any], *, durable: bool = False) -> bool:
        """Add an entry with one system call.

        Args:
            entry: a JSON object.
            durable: whether the entry has to be on the disk before this returns. Any other survives the end of this
                process, and may be lost when the machine fails, which its workers do not survive either.

        Returns:
            whether it was written; else the file may hold the entry, a part of it, or nothing of it.
        """
        try:
            append_line(self._descriptor, entry)
            if os.fstat(self._descriptor).st_size > max(self._small, GROWTH * self._compact_size):
                self.rewrite()
            elif durable:
                os.fsync(self._descriptor)
        except OSError as error:
            warn_without_script(f"{self._path} is incomplete: {error}. The job goes on")
            return False
        return True

    def rewrite(self) -> None:
        """Replace all entries of the file by those of the present state.

        Raises:
            OSError: it cannot be written; the file is as before.
        """
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        data = b"".join(map(to_json, self._all_entries()))
        descriptor = open_lines(temporary, OWN, os.O_TRUNC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(data)
            os.fsync(descriptor)
            temporary.replace(self._path)
            os.fsync(self._lock)  # the folder
        except OSError:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._compact_size = len(data)

    def close(self) -> None:
        """Close the file, so that another process can open it."""
        os.close(self._descriptor)
        os.close(self._lock)


def _lock(folder: Path) -> int:
    # The folder is locked, and not the file, since each rewriting makes a new file.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise JobError(f"another coordinator already works in {folder}") from error
        # Some network file systems have no locks: there a second coordinator is not noticed.
    return descriptor
