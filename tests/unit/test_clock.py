"""The clock of the wall may jump by a day: nobody is taken to be lost by it."""

import ast
from pathlib import Path

import pytest

import unisono

pytestmark = pytest.mark.unit

SOURCES = Path(unisono.__file__).parent

DECIDE = ("membership", "train", "reduce", "sync", "adapt", "data", "plan")
"""What decides who takes part, and what is computed."""

TOLD = {"membership/state_log.py": "in lines of the journal"}
"""Where the time of day is asked for all the same, and for what."""


def asks_for_the_time_of_day(path: Path) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = {ast.unparse(function) for function in calls}
    return any(name in ("time.time", "time.time_ns") or name.endswith(("datetime.now", "utcnow")) for name in names)


def test_what_decides_who_takes_part_does_not_ask_for_the_time_of_day() -> None:
    paths = [path for part in DECIDE for path in (SOURCES / part).rglob("*.py")]
    assert {str(path.relative_to(SOURCES)) for path in paths if asks_for_the_time_of_day(path)} == set(TOLD)
