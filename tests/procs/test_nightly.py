"""What runs for each change, and at night: all of it, whatever fails, and what failed is named."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.procs

ROOT = Path(__file__).parents[2]

MAKE = """#!/bin/sh
echo "making $1"
echo "$1" >> {made}
echo "$1 ${{UNISONO_BLOWS-}}" >> {made}.blows
[ "$1" != check ] && [ "$1" != soak ]
"""


def nightly(folder: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    """With a make that fails in two targets."""
    make = folder / "make"
    make.write_text(MAKE.format(made=folder / "made.txt"))
    make.chmod(0o755)
    environ = {**os.environ, "MAKE": str(make), "NIGHTLY_LOGS": str(folder / "logs"), "NIGHTLY_COMMIT": "abc"}
    command = [str(ROOT / ".ci" / "nightly"), *targets]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_a_failure_does_not_end_the_night_and_all_failures_are_named(tmp_path: Path) -> None:
    done = nightly(tmp_path, "check", "bench", "soak", "chaos")
    assert done.returncode == 1
    assert (tmp_path / "made.txt").read_text().split() == ["check", "bench", "soak", "chaos"]
    assert done.stderr == "nightly: 2 of 4 failed: check soak\n"
    assert (tmp_path / "logs" / "soak.log").read_text() == "making soak\n"
    assert "making check" in done.stdout


def test_a_night_without_failures_is_a_good_one(tmp_path: Path) -> None:
    done = nightly(tmp_path, "bench", "chaos")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_night_that_was_cut_off_goes_on_with_what_has_not_passed_on_this_commit(tmp_path: Path) -> None:
    nightly(tmp_path, "check", "bench")
    done = nightly(tmp_path, "check", "bench", "chaos")
    assert (tmp_path / "made.txt").read_text().split() == ["check", "bench", "check", "chaos"]
    assert "bench: passed before on this commit" in done.stdout
    (tmp_path / "logs" / "bench.passed").write_text("another commit\n")
    nightly(tmp_path, "bench")
    assert (tmp_path / "made.txt").read_text().split()[-1] == "bench"


def test_every_benchmark_that_can_be_made_is_made_at_night(tmp_path: Path) -> None:
    nightly(tmp_path)
    made = (tmp_path / "made.txt").read_text().split()
    lines = (ROOT / "Makefile").read_text().splitlines()
    targets = {line.partition(":")[0] for line in lines if line.startswith("bench")}
    assert targets <= set(made)
    assert {
        "check",
        "procs",
        "slow",
        "alone",
        "flips",
        "mutants",
        "newest-torch",
        "oldest-frameworks",
        "with-tensorflow",
        "with-curvlinops",
        "with-ray-default",
        "soak",
        "chaos",
    } <= set(made)
    assert made[0] == "check"
    assert "procs 300" in (tmp_path / "made.txt.blows").read_text().splitlines()  # more draws than for a change


def test_a_change_has_to_pass_each_part_of_check_docs_and_test_once_whatever_fails(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/made.txt\n[ "$1" != unit-and-procs ] && [ "$1" != again ]\n')
    make.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(ROOT / ".ci" / "run")], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    rules = (ROOT / "Makefile").read_text().splitlines()
    parts = [line.partition("#")[0].split()[1:] for line in rules if line.startswith(("check:", "test:"))]
    flags = {"--keep-going", "--jobs", "2"}
    made = [each for each in (tmp_path / "made.txt").read_text().split() if each not in flags]
    wanted = {"docs", "compiled", "again", "slurm", "browser", *(part for each in parts for part in each)}
    wanted -= {"unit"}  # which unit-and-procs has
    assert sorted(made) == sorted(wanted)
    assert made[-1] == "alone"
    assert (done.returncode, done.stderr) == (1, ".ci/run: 'make again' failed\n")
