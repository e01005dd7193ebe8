"""The events of a run's journal as short texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any


def moment_of(line: Mapping[str, Any]) -> float | None:
    """The time at which a line was written, in seconds since 1970; None if the line does not have it."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def title_of(line: Mapping[str, Any]) -> str:
    """The event of a line as a short text; empty if the event is unknown."""
    try:
        return TITLES[line["event"]](line)
    except (KeyError, TypeError, ValueError, RecursionError):  # another version wrote other fields
        return ""


def _worker_on_host(line: Mapping[str, Any]) -> str:
    rank = "" if line.get("rank") is None else f" (rank {line['rank']})"
    return f"{line['worker']}{rank} on {line['host']}"


def _decided(line: Mapping[str, Any]) -> str:
    value = line.get("value")
    value_text = "" if value is None else f" {value:.4g}" if isinstance(value, float) else f" {value}"
    return f"{line['policy']}: {str(line['verb']).replace('_', ' ')}{value_text}"


def _minted(line: Mapping[str, Any]) -> str:
    joined = f"{', '.join(line['joined'])} joined: " if line["joined"] else ""
    return f"{joined}{', '.join(line['workers'])} train"


TITLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "lost": lambda line: f"{_worker_on_host(line)} is lost: {line['why']}",
    "left": lambda line: f"{_worker_on_host(line)} has left: {line['reason']}",
    "excluded": lambda line: f"{_worker_on_host(line)} is excluded",
    "replaced": lambda line: f"{_worker_on_host(line)} is replaced",
    "not replaced": lambda line: f"{_worker_on_host(line)} is not replaced: {line['why']}",
    "minted": _minted,
    "resized": lambda line: f"resized from {line['before']} to {line['workers']} workers by {line['by']}",
    "decided": _decided,
    "checkpoint": lambda line: f"checkpoint after step {line['step']}",
    "checkpoint failed": lambda line: f"checkpoint failed: {line['error']}",
    "healed": lambda line: f"{line['what']} healed at step {line['step']}",
    "rolled back": lambda line: f"back from step {line['step']} to {line['to']}: {line['why']}",
    "observed": lambda line: f"{line['policy']}: {line['figures']['notices']} notices",
    "started": lambda line: f"started with {line['world_size']} workers",
    "resumed": lambda line: f"resumed at step {line['step']} with {line['world_size']} workers",
    "finished": lambda line: f"finished after {line['step']} steps",
    "over": lambda line: f"over: {line['outcome']}{': ' if line['reason'] else ''}{line['reason']}",
    "agent joined": lambda line: f"host {line['host']}: room for {line['workers']} workers",
    "topology": lambda line: f"topology {line.get('topology') or line.get('chosen') or 'measured'}",
}
