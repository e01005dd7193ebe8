"""A process of the suite that crashes costs the test that it was in, and neither the others nor the end of the run."""

import re
from pathlib import Path

import pytest

from commands import python

pytestmark = [pytest.mark.procs, pytest.mark.slow]  # what the tests themselves are made of

CONFTEST = """
from scheduling import Together

def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return Together(config, log)
"""

CRASHES = """
import os, pytest

@pytest.mark.parametrize("number", range({tests}))
def test_one(number):
    if number in {crash}:
        os._exit(1)
"""


@pytest.mark.parametrize("crash", [{0}, {5}, {6}, {1, 6}], ids=str)
def test_all_other_tests_are_run_once(tmp_path: Path, crash: set[int]) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_crash.py").write_text(CRASHES.format(tests=7, crash=crash))
    words = ("-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-v", "--rootdir", ".")
    result = python(*words, cwd=tmp_path, PYTHONPATH=str(Path(__file__).parents[1]), PYTEST_ADDOPTS="")
    ended = re.findall(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED) test_crash\.py::test_one\[(\d)\]", result.stdout)
    assert sorted(ended, key=lambda each: each[1]) == [
        ("FAILED" if number in crash else "PASSED", str(number)) for number in range(7)
    ], result.stdout
