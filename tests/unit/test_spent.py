"""What a test costs, and how it is told."""

import subprocess
import sys

import pytest

from spent import SHOWN, dearest, processor_s

pytestmark = pytest.mark.unit

BUSY = """
import subprocess, sys, time
if sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=sys.stdout, start_new_session=True).wait()
while time.process_time() < 0.3:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_a_process_counts_while_it_runs_and_once_when_it_has_ended_with_all_below_it() -> None:
    before = processor_s()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, BUSY.replace("sys.stdin.read()", "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as busy:
        assert busy.stdout is not None
        assert [busy.stdout.readline() for _ in range(2)] == ["done\n"] * 2
        running = processor_s() - before
    assert 0.55 < running <= processor_s() - before < running + 0.58


def test_the_dearest_files_and_tests_come_first_and_no_more_than_a_screen_holds() -> None:
    spent = {f"tests/unit/test_{number}.py::test_it[tests/x]": float(number) for number in range(20)}
    lines = dearest({**spent, "tests/procs/test_19.py::test_a": 1.5, "tests/procs/test_0.py::test_b": 18.4})
    assert lines[0] == "210 processor-seconds, of which"
    assert [line.split() for line in lines[1:4]] == [
        ["20.5", "test_19.py"],
        ["18.4", "test_0.py"],
        ["18.0", "test_18.py"],
    ]
    assert lines[1 + SHOWN].split() == ["19.0", "unit/test_19.py::test_it[tests/x]"]
    assert len(lines) == 1 + 2 * SHOWN
