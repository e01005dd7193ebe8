"""The clock of the wall may jump by a day: what is decided by time is decided by another clock."""

import ast
from pathlib import Path

import pytest

import unisono

pytestmark = pytest.mark.unit

SOURCES = Path(unisono.__file__).parent

TOLD = {
    "checkpoint/folder.py": "lines of the journal, names of folders",
    "checkpoint/hold.py": "since when a folder is held, for people",
    "checkpoint/store.py": "an hour in which another host has written nothing into a folder that it began",
    "launch/elastic/agent.py": "when workers ended: which end was the cause",
    "launch/ending/failure.py": "when a worker failed: likewise",
    "launch/local.py": "when workers ended: likewise",
    "membership/ledger.py": "lines of the journal",
}
"""Where the time of day is asked for, and for what: nobody is lost by it."""


def asks_for_the_time_of_day(path: Path) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = {ast.unparse(function) for function in calls}
    return any(name in ("time.time", "time.time_ns") or name.endswith(("datetime.now", "utcnow")) for name in names)


def test_the_time_of_day_is_told_and_decides_nothing() -> None:
    found = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if asks_for_the_time_of_day(path)}
    assert {path for path in found if not path.startswith("study/")} == set(TOLD)
