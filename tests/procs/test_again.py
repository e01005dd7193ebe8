"""Tests that failed are run once more before they stop a change."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from commands import python

pytestmark = pytest.mark.procs

AGAIN = Path(__file__).parents[1] / "again.py"
TESTS = """
from pathlib import Path

def test_fails_beside_others():
    marker = Path("tried")
    was_tried = marker.exists()
    marker.touch()
    assert was_tried

def test_fails_always():
    raise AssertionError("always")

def test_passes():
    pass
"""


def again(folder: Path, *failed: str) -> subprocess.CompletedProcess[str]:
    """Try tests again that are said to have failed."""
    (folder / "test_it.py").write_text(TESTS)
    cache = folder / ".pytest_cache" / "v" / "cache" / "lastfailed"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({f"test_it.py::{name}": True for name in failed}))
    return python(AGAIN, cwd=folder)


def test_a_test_that_passes_when_it_is_alone_is_named_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "tried").touch()
    done = again(tmp_path, "test_fails_beside_others")
    assert done.returncode == 0, done.stdout
    assert "UNSTEADY" in done.stdout
    assert "test_it.py::test_fails_beside_others" in done.stdout
    assert "1 passed" in done.stdout


def test_a_test_that_fails_again_stops_the_change(tmp_path: Path) -> None:
    (tmp_path / "tried").touch()
    done = again(tmp_path, "test_fails_beside_others", "test_fails_always")
    assert done.returncode == 1
    assert "UNSTEADY" not in done.stdout


@pytest.mark.parametrize("failed", [(), ("a", "b", "c", "d")], ids=["none", "many"])
def test_none_or_many_failures_are_not_tried_again(failed: tuple[str, ...], tmp_path: Path) -> None:
    done = again(tmp_path, *failed)
    assert done.returncode == 1
    assert f"{len(failed)} tests failed" in done.stdout
