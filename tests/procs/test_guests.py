"""Which ways of running a job end other frameworks' scripts in the same bits: the table in docs/guide/frameworks.md."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import completed, python
from outcomes import PATIENCE_S, outcome_in, struck_by, train
from serial_runs import SerialRuns
from unisono_lab.faults.faults import Faults

pytestmark = [
    pytest.mark.procs,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("warm", "serial_launches"),
]

SCRIPTS = Path(__file__).parent / "scripts"
GUESTS = {
    "Keras": SCRIPTS / "keras_training.py",
    "Lightning": SCRIPTS / "lightning_training.py",
    "Transformers": SCRIPTS / "transformers_training.py",
    "accelerate": SCRIPTS / "accelerate_training.py",
}
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "frameworks.md"

Ended = subprocess.CompletedProcess[str]


def launched(*options: str) -> Callable[[Path, Path], Ended]:
    return lambda script, folder: train(folder, *options, script=script)


def struck(faults: Faults, *options: str) -> Callable[[Path, Path], Ended]:
    return lambda script, folder: train(folder, *options, *struck_by(folder, faults), script=script)


def under_torchrun(script: Path, folder: Path) -> Ended:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    return python(*torchrun, script, timeout=PATIENCE_S, UNISONO_RUN_DIR=str(folder))


def resumed(script: Path, folder: Path) -> Ended:
    assert train(folder, "-n", "3", script=script, settings={"UNISONO_STOP_AFTER": "6"}).returncode == 0
    return train(folder, "-n", "2", script=script)


WAYS: dict[str, Callable[[Path, Path], Ended]] = {
    "2 workers": launched("-n", "2"),
    "3 workers": launched("-n", "3"),
    "5 workers": launched("-n", "5"),
    "torchrun": under_torchrun,
    "a worker is killed, and replaced": struck(Faults().kill(rank=1, at_step=5), "-n", "3", "--max-restarts", "3"),
    "the main worker is killed": struck(Faults().kill(rank=0, at_step=7), "-n", "2:3"),
    "a worker joins": struck(Faults().resize(workers=2, at_step=3), "-n", "1:2"),
    "resumed from 3 workers to 2": resumed,
}


def said(printed: str) -> set[str]:
    """What the main worker printed of histories, metrics and predictions when it was done."""
    return set(re.findall(r"(?:^|\] )(after .*)", printed, re.MULTILINE))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("guest", GUESTS)
def test_each_way_ends_in_the_bits_of_the_serial_run_where_the_table_says_so(
    guest: str, way: str, serial_runs: SerialRuns, tmp_path: Path
) -> None:
    script = GUESTS[guest]
    serial = serial_runs(script)
    ended = WAYS[way](script, tmp_path / "run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same = outcome_in(tmp_path / "run") == outcome_in(serial.run_dir)
    told = said(ended.stdout) == said(serial.output.read_text())
    assert (same, told) == (True, True), ended.stdout
    assert cell(way, guest) == "same bits"


def cell(way: str, guest: str) -> str:
    """What the table says."""
    rows = [
        [part.strip() for part in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if "|" in line
    ]
    columns = next(row for row in rows if guest in row)
    return next(row for row in rows if row[0] == way)[columns.index(guest)]


@pytest.mark.parametrize("guest", GUESTS)
def test_unisono_verify_finds_a_script_of_the_guest_identical(guest: str, tmp_path: Path) -> None:
    done = completed("verify", GUESTS[guest], cwd=tmp_path, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Identical: all" in done.stdout
    assert cell("`unisono verify`", guest) == "identical"
