"""How much of the house runs in a step, and that both ways of docs/architecture.md go as the page says."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from commands import python

pytestmark = pytest.mark.procs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "procs" / "scripts" / "traced_steps.py"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MOST_FILES, MOST_FUNCTIONS, MOST_CALLS = 49, 273, 374
"""Of a step with default settings, 2 workers, 4 shards and 4 tensors, on each worker."""

MOST_MORE_FILES = 44
"""Files that an ordinary step does not run, on each worker that is left when one of three is killed."""


def traced(folder: Path, crew: list[str], strikes: int | None = None) -> list[dict[str, Any]]:
    """What each worker that is left has written."""
    struck = {} if strikes is None else {"STRIKES": str(strikes)}
    words = ("run", "-n", *crew, "--run-dir", folder, SCRIPT)
    done = python("-m", "unisono", *words, env={**os.environ, **struck}, cwd=folder.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in sorted(folder.glob("traced-*.json"))]


def files(functions: list[str]) -> set[str]:
    return {function.partition(":")[0] for function in functions}


def way(title: str) -> list[str]:
    """The functions of a way that run in workers, in the page's order."""
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\d+\. .*?`([\w/]+\.py:[\w.]+)`", text, re.MULTILINE)
    return [each for each in named if each.startswith(("train/", "reduce/"))]


def test_an_ordinary_step_goes_the_way_of_a_gradient_and_runs_no_more_than_it_has_to(tmp_path: Path) -> None:
    workers = traced(tmp_path / "run", ["2"])
    assert len(workers) == 2
    for worker in workers:
        functions = worker["ordinary"]["functions"]
        assert [each for each in functions if each in way("The way of a gradient")] == way("The way of a gradient")
        counts = len(files(functions)), len(functions), worker["ordinary"]["calls"]
        assert all(map(int.__le__, counts, (MOST_FILES, MOST_FUNCTIONS, MOST_CALLS))), counts


@pytest.mark.slow
def test_a_worker_that_is_left_goes_the_way_of_an_event(tmp_path: Path) -> None:
    workers = traced(tmp_path / "run", ["3", "--max-restarts", "1"], strikes=1)
    assert len(workers) == 2
    handed_over = [
        "recovery/recovery.py:Recovery.give",
        "group/workers.py:Workers.broadcast",
        "state/trained.py:Trained.take",
    ]
    lacking = {f"train/{each}" for each in handed_over}  # where a worker that is left lacks an update
    for worker in workers:
        functions = worker["struck"]["functions"]
        assert [each for each in way("The way of an event") if each not in functions and each not in lacking] == []
        assert len(files(functions) - files(worker["ordinary"]["functions"])) <= MOST_MORE_FILES
