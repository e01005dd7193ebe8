"""Tests that share something costly are run by one process."""

import re
from pathlib import Path

import pytest

from scheduling import TOGETHER, in_order

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[1]


def test_files_with_a_fixture_of_their_own_for_several_tests_stay_whole_and_no_others() -> None:
    shares = re.compile(r"""^@pytest\.fixture\(scope="module"[,)]|\bcluster: Cluster\b""", re.MULTILINE)
    sharing = [path for path in TESTS.rglob("test_*.py") if shares.search(path.read_text())]
    of_processes = {path.name for path in sharing if path.parent.name == "procs"}
    assert of_processes <= TOGETHER.keys() <= {path.name for path in sharing}


def test_tests_that_wait_and_tests_that_compute_come_in_turns_after_whole_files_and_before_unit_tests() -> None:
    tests = [
        "a unit",
        "b unit",
        *(f"{n} procs" for n in range(2)),
        *(f"{n} cluster" for n in range(4)),
        "test_exact.py procs",
    ]
    found = in_order(tests, lambda test: test.split()[0], lambda test: test.split()[1])
    assert found == [
        *("test_exact.py procs", "0 procs", "0 cluster", "1 cluster", "1 procs", "2 cluster", "3 cluster"),
        *("a unit", "b unit"),
    ]
