"""The coordinator's state on disk: JSON lines, only ever appended to, and from time to time written anew."""

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
"""Ids of rows, by the name of their table."""

_STATE: TypeAdapter[State] = TypeAdapter(State)
_ROWS: dict[str, TypeAdapter[Any]] = {"workers": TypeAdapter(Worker), "agents": TypeAdapter(Agent)}
_TYPES = get_type_hints(State)
_FIELDS: dict[str, TypeAdapter[Any]] = {
    field.name: TypeAdapter(_TYPES[field.name])
    for field in fields(State)
    if field.name not in {*_ROWS, *REPORTED_AGAIN}
}


def whole(state: State) -> Plain:
    """All of a state, as plain values: but for what is said again whenever somebody connects."""
    plain: Plain = {name: adapter.dump_python(getattr(state, name), mode="json") for name, adapter in _FIELDS.items()}
    for name in _ROWS:
        plain[name] = {row.id: _plain(name, row) for row in getattr(state, name).values()}
    return plain


def changes(before: State, after: State, rows: Rows) -> Plain:
    """What has changed, as plain values."""
    plain: Plain = {}
    for name, adapter in _FIELDS.items():
        new = getattr(after, name)
        if new is not getattr(before, name) and new != getattr(before, name):
            plain[name] = adapter.dump_python(new, mode="json")
    for name, ids in rows.items():
        table = getattr(after, name)
        plain[name] = {row_id: _plain(name, table[row_id]) if row_id in table else None for row_id in sorted(ids)}
    return plain


def merge(known: Plain, new: Plain) -> None:
    """Take over changes.

    Args:
        known: a state as of :func:`whole`, or what a file says is one; it becomes the one after.
        new: changes as of :func:`changes`, or what a file says they are.
    """
    for name, value in new.items():
        if name not in _ROWS:
            known[name] = value
            continue
        table = known.setdefault(name, {})
        if not isinstance(table, dict) or not isinstance(value, dict):
            raise JobError(f"its {name} are damaged; remove it to begin anew")
        for row_id, row in value.items():
            if row is None:
                table.pop(row_id, None)
            else:
                table[row_id] = row


def restored(known: Plain) -> State:
    """A state from plain values.

    Raises:
        JobError: they are none.
    """
    try:
        return _STATE.validate_json(json.dumps(known))
    except (ValidationError, RecursionError) as error:
        raise JobError("another version of Unisono wrote it; remove it to begin anew") from error


def _plain(table: str, row: Any) -> Any:
    return _ROWS[table].dump_python(row, mode="json", exclude={"signs"})


# The coordinator's lines in the run folder's journal, which the workers write as well.


class Journal:
    """Appends events to a file of JSON lines, each with the time it happened.

    What cannot be written is warned of and left out: no job ends for want of a line in its journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def line(self, event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What there is to write of an event that happens now."""
        return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines, at once and each of them whole."""
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
        """Append those of the lines that are not there: whoever was about to write them has been killed."""
        there = read_lines(self._path)
        self.append(line for line in lines if line not in there)


# What the coordinator knows, on disk: JSON lines that are only ever added to, and from time to time written anew.

SMALL = 2**20  # bytes

OWN = 0o600
"""Nobody else may read or write it."""

GROWTH = 4
"""How many times as large as after it was written anew it may become."""

Everything = Callable[[], Iterable[Mapping[str, Any]]]
"""The entries that say all that is known now."""


class StateLog:
    """A file of entries, which only one process at a time may keep open.

    What cannot be written (a full disk, say) is warned of and left out: training goes on, and what is lost is only
    that the coordinator could start again.

    Args:
        path: the file's path. Its folder exists.
        everything: the entries that say all that is known now.
        small: bytes up to which it is never written anew.

    Raises:
        JobError: another process keeps it, or it cannot be opened.
    """

    def __init__(self, path: Path, everything: Everything, small: int = SMALL) -> None:
        self._path = path
        self._everything = everything
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
            durable: it is on the disk before this returns. Any other survives the end of this process, and may be
                lost with the machine's, which its workers do not survive either.

        Returns:
            whether all went well; else the entry may be there, or not, or half of it.
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
        """Write all that is known now in place of all that was known once.

        Raises:
            OSError: it cannot be written; the file is as before.
        """
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        data = b"".join(map(to_json, self._everything()))
        descriptor = open_lines(beside, OWN, os.O_TRUNC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(data)
            os.fsync(descriptor)
            beside.replace(self._path)
            os.fsync(self._lock)  # the folder
        except OSError:
            os.close(descriptor)
            beside.unlink(missing_ok=True)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._compact_size = len(data)

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._descriptor)
        os.close(self._lock)


def _lock(folder: Path) -> int:
    # The folder is locked, not the file, which is another one after each rewriting.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise JobError(f"another coordinator already works in {folder}") from error
        # Not every network file system has locks.
    return descriptor
