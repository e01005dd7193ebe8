"""The kinds of events that the page shows, and each event in a line."""

from collections.abc import Callable, Mapping
from typing import Any

KINDS = ("lost", "join", "left", "resize", "decision", "strategy", "topology", "checkpoint", "healed", "notice", "run")
"""Each with a sign of its own on the page."""

KIND_OF = {
    "lost": "lost",
    "left": "left",
    "excluded": "left",
    "replaced": "left",
    "resized": "resize",
    "topology": "topology",
    "checkpoint": "checkpoint",
    "healed": "healed",
    "rolled back": "healed",
    "wrong result": "healed",
    "computed again": "healed",
    "started": "run",
    "resumed": "run",
    "starts over": "run",
    "coordinator restarted": "run",
    "preempted": "run",
    "finished": "run",
    "over": "run",
    "job changed": "run",
    "agent joined": "run",
    "agent left": "run",
    "agent lost": "lost",
    "asked to stop": "run",
    "asked to checkpoint": "run",
    "checkpoint failed": "notice",
    "checkpoint damaged": "notice",
    "checkpoint not finite": "notice",
    "skipped": "notice",
    "not formed": "notice",
    "not replaced": "notice",
    "no connection": "notice",
    "connected again": "notice",
    "left out": "notice",
    "not left out any more": "notice",
    "fault": "notice",
}

KIND_OF_VERB = {"set_strategy": "strategy", "set_topology": "topology", "set_balance": "topology"}


def kind_of(line: Mapping[str, Any]) -> str:
    """The kind of an event; empty for one that is not shown."""
    event, verb = line.get("event"), line.get("verb")
    if event == "minted":
        return "join" if line.get("joined") and line.get("generation") != 1 else ""
    if event == "decided":
        return KIND_OF_VERB.get(verb, "decision") if isinstance(verb, str) else "decision"
    if event == "observed":
        figures = line.get("figures")
        return "notice" if isinstance(figures, Mapping) and figures.get("notices") else ""
    return KIND_OF.get(event, "") if isinstance(event, str) else ""


def title_of(line: Mapping[str, Any]) -> str:
    """An event in a line, for people."""
    event = str(line.get("event"))
    try:
        title = TITLES.get(event)
        return _named(event, line) if title is None else title(line)
    except (KeyError, TypeError, ValueError, RecursionError):  # another version wrote other fields
        return event


def _named(event: str, line: Mapping[str, Any]) -> str:
    who = line.get("worker") or line.get("agent") or line.get("policy") or line.get("error") or ""
    return f"{event}: {who}" if who else event


def _where(line: Mapping[str, Any]) -> str:
    return f"{line['worker']} on {line['host']}"


def _decided(line: Mapping[str, Any]) -> str:
    value = line.get("value")
    said = "" if value is None else f" {value:.4g}" if isinstance(value, float) else f" {value}"
    return f"{line['policy']}: {str(line['verb']).replace('_', ' ')}{said}"


TITLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "lost": lambda one: f"{_where(one)} is lost: {one['why']}",
    "left": lambda one: f"{_where(one)} has left: {one['reason']}",
    "excluded": lambda one: f"{_where(one)} is excluded",
    "replaced": lambda one: f"{_where(one)} is replaced",
    "not replaced": lambda one: f"{_where(one)} is not replaced: {one['why']}",
    "minted": lambda one: f"{', '.join(one['joined'])} joined: {len(one['workers'])} workers",
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
