"""Which faults of a rehearsal have ended workers: a kill that somebody ordered is no memory that ran out."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unisono.checkpoint.folder import RunFolder
from unisono.errors import Unreadable
from unisono.jsonl import read_lines
from unisono.launch.ending.outcome import WorkerExit

KINDS = {-signal.SIGKILL: "kill", -signal.SIGTERM: "leave"}
"""Faults that end a worker, by the exit code that it has then."""


def with_faults(exits: Sequence[WorkerExit], folder: RunFolder) -> tuple[WorkerExit, ...]:
    """The same exits; those of workers that a fault has ended say which, as far as the folder's journal knows."""
    if not any(each.code in KINDS for each in exits):
        return tuple(exits)
    struck = {}
    for line in _journal(folder):
        if line.get("event") == "fault" and isinstance(line.get("pid"), int) and isinstance(line.get("kind"), str):
            words = f"fault {line.get('number')} ({line.get('kind')}) of the rehearsal, at step {line.get('step')}"
            struck[line.get("pid"), line.get("kind")] = words
    return tuple(replace(each, fault=struck.get((each.pid, KINDS.get(each.code)), "")) for each in exits)


def _journal(folder: RunFolder) -> list[dict[str, Any]]:
    try:
        return read_lines(folder.path / "journal.jsonl")
    except (OSError, Unreadable):
        return []
