"""The events of a run's journal in words, for all who show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any


def moment_of(line: Mapping[str, Any]) -> float | None:
    """When a line was written, in seconds since 1970; None if it does not say."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def title_of(line: Mapping[str, Any]) -> str:
    """What a line says, for people; empty if nobody knows how to say it."""
    try:
        return TITLES[line["event"]](line)
    except (KeyError, TypeError, ValueError, RecursionError):  # another version wrote other fields
        return ""


def _where(one: Mapping[str, Any]) -> str:
    rank = "" if one.get("rank") is None else f" (rank {one['rank']})"
    return f"{one['worker']}{rank} on {one['host']}"


def _decided(one: Mapping[str, Any]) -> str:
    value = one.get("value")
    said = "" if value is None else f" {value:.4g}" if isinstance(value, float) else f" {value}"
    return f"{one['policy']}: {str(one['verb']).replace('_', ' ')}{said}"


def _minted(one: Mapping[str, Any]) -> str:
    came = f"{', '.join(one['joined'])} joined: " if one["joined"] else ""
    return f"{came}{', '.join(one['workers'])} train"


TITLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "lost": lambda one: f"{_where(one)} is lost: {one['why']}",
    "left": lambda one: f"{_where(one)} has left: {one['reason']}",
    "excluded": lambda one: f"{_where(one)} is excluded",
    "replaced": lambda one: f"{_where(one)} is replaced",
    "not replaced": lambda one: f"{_where(one)} is not replaced: {one['why']}",
    "minted": _minted,
    "resized": lambda one: f"resized from {one['before']} to {one['workers']} workers by {one['by']}",
    "decided": _decided,
    "checkpoint": lambda one: f"checkpoint after step {one['step']}",
    "checkpoint failed": lambda one: f"checkpoint failed: {one['error']}",
    "healed": lambda one: f"{one['what']} healed at step {one['step']}",
    "rolled back": lambda one: f"back from step {one['step']} to {one['to']}: {one['why']}",
    "observed": lambda one: f"{one['policy']}: {one['figures']['notices']} notices",
    "started": lambda one: f"started with {one['world_size']} workers",
    "resumed": lambda one: f"resumed at step {one['step']} with {one['world_size']} workers",
    "finished": lambda one: f"finished after {one['step']} steps",
    "over": lambda one: f"over: {one['outcome']}{': ' if one['reason'] else ''}{one['reason']}",
    "agent joined": lambda one: f"host {one['host']}: room for {one['workers']} workers",
    "topology": lambda one: f"topology {one.get('topology') or one.get('chosen') or 'measured'}",
}
