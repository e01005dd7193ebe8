"""Points at which a worker may be struck have names, and each is somewhere in the code."""

import re
from pathlib import Path

import pytest

import unisono
from unisono import failpoints
from unisono.failpoints import POINTS, failpoint
from unisono_lab.faults.faults import OF_SOME, RECOVERY, listening

pytestmark = pytest.mark.unit

PASSED = re.compile(r'failpoint\("([^"]+)"\)')


def test_every_point_in_the_code_is_listed_and_every_listed_one_is_in_the_code() -> None:
    sources = Path(unisono.__file__).parent.rglob("*.py")
    assert {name for source in sources for name in PASSED.findall(source.read_text())} == set(POINTS)


def test_who_listens_is_told_of_each_point_until_it_is_over() -> None:
    heard: list[str] = []
    with listening(heard.append):
        failpoint("act counted")
    failpoint("act counted")
    assert heard == ["act counted"]
    assert failpoints._listener is None


def test_faults_strike_at_points_that_there_are() -> None:
    assert set(OF_SOME) < set(RECOVERY) < set(POINTS)
