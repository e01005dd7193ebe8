"""Tests that share something costly are run by one process."""

import re
from pathlib import Path

import pytest

from scheduling import TOGETHER

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[1]


def test_files_with_a_fixture_of_their_own_for_several_tests_stay_whole_and_no_others() -> None:
    shares = re.compile(r"""^@pytest\.fixture\(scope="module"\)|\bcluster: Cluster\b""", re.MULTILINE)
    sharing = [path for path in TESTS.rglob("test_*.py") if shares.search(path.read_text())]
    of_processes = {path.name for path in sharing if path.parent.name == "procs"}
    assert of_processes <= TOGETHER.keys() <= {path.name for path in sharing}
