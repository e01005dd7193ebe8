"""The coordinator's state as entries of its log: whole, or what has changed since the entry before."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from unisono.errors import JobError
from unisono.membership.state.rows import Agent, Worker
from unisono.membership.state.state import SAID_AGAIN, State

Plain = dict[str, Any]
Rows = Mapping[str, Iterable[str]]
"""Ids of rows, by the name of their table."""

_STATE: TypeAdapter[State] = TypeAdapter(State)
_ROWS: dict[str, TypeAdapter[Any]] = {
    "workers": TypeAdapter(Worker),
    "agents": TypeAdapter(Agent),
}
_TYPES = get_type_hints(State)
_FIELDS: dict[str, TypeAdapter[Any]] = {
    field.name: TypeAdapter(_TYPES[field.name]) for field in fields(State) if field.name not in {*_ROWS, *SAID_AGAIN}
}


def whole(state: State) -> Plain:
    """All of a state, as plain values: but for what is said again whenever somebody connects."""
    found: Plain = {name: adapter.dump_python(getattr(state, name), mode="json") for name, adapter in _FIELDS.items()}
    for name in _ROWS:
        found[name] = {row.id: _plain(name, row) for row in getattr(state, name).values()}
    return found


def changes(before: State, after: State, rows: Rows) -> Plain:
    """What has changed, as plain values.

    Args:
        before: the state before.
        after: the state after.
        rows: the ids of the rows that may differ.
    """
    found: Plain = {}
    for name, adapter in _FIELDS.items():
        new = getattr(after, name)
        if new is not getattr(before, name) and new != getattr(before, name):
            found[name] = adapter.dump_python(new, mode="json")
    for name, ids in rows.items():
        table = getattr(after, name)
        found[name] = {each: _plain(name, table[each]) if each in table else None for each in sorted(ids)}
    return found


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
        for each, row in value.items():
            if row is None:
                table.pop(each, None)
            else:
                table[each] = row


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
