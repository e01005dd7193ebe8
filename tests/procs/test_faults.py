"""Fault plans, injected by real workers: each fault happens once, and the weights stay those of the serial run.

Workers that die at every point, also of a recovery: ``tests/unit/test_struck.py``. Bits that flip in each place:
``tests/unit/test_flips.py``.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from outcomes import struck_by, train
from serial_runs import SerialRuns
from training import SCRIPT, Trained
from unisono_lab.faults.faults import Faults

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm"), pytest.mark.slow]

SHORT: Any = {"PACE_S": "0", "EPOCHS": "4"}  # five steps each, and ten more
LONG: Any = SHORT | {"EPOCHS": "12"}


def test_every_fault_that_a_job_survives_strikes_once_and_changes_no_bit(
    serial_runs: SerialRuns, tmp_path: Path
) -> None:
    faults = (
        Faults()
        .kill(rank=1, at_step=2, after_s=0.005)
        .stop(rank=0, at_step=6, for_s=0.3)
        .resize(workers=2, at_step=10)
        .slow(rank=1, factor=3, at_step=14, steps=2)
        .partition(rank=1, at_step=18, for_s=0.5)
        .kill_coordinator(at_step=22, for_s=0.2)
        .stop(rank=1, at_step=26)
        .leave(rank=1, at_step=44)  # which there is once the stopped one is replaced: the last one does not leave alone
        .join(at_step=48)
        .kill(rank=0, at_step=62)
    )
    job = Trained(tmp_path / "run")
    options = ("-n", "1:3", "--max-restarts", "9", "--failure-timeout-s", "4", *struck_by(job.run_dir, faults))
    ended = train(job.run_dir, *options, script=SCRIPT, settings=LONG)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert job.end() == serial_runs(SCRIPT, **LONG).end()
    struck = job.journal("fault")
    assert sorted(line["number"] for line in struck) == list(range(1, 11))
    assert all(line["step"] >= faults.faults[line["number"] - 1].at_step for line in struck)
    assert job.journal("fault failed") == []
    assert len(job.journal("lost")) == 3  # two killed, one that stood still
    assert job.journal("coordinator restarted")
    assert job.journal("resized")


def test_a_worker_that_computes_wrongly_is_named_and_replaced_and_leaves_no_trace(
    serial_runs: SerialRuns, tmp_path: Path
) -> None:
    job = Trained(tmp_path / "run")
    wrong = struck_by(job.run_dir, Faults().wrong_result(rank=1, at_step=8, bit=22))
    options = ("-n", "3", "--max-restarts", "9", "--audit", "0.1", *wrong)
    ended = train(job.run_dir, *options, script=SCRIPT, settings=SHORT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert job.end() == serial_runs(SCRIPT, **SHORT).end()
    named = job.journal("wrong result")
    assert {(line["rank"], line["transient"]) for line in named} == {(1, False)}
    assert job.journal("replaced")
    assert job.journal("rolled back")
    found = json.loads((job.run_dir / "result.json").read_text())
    assert [one["rank"] for one in found["wrong_results"]] == [1] * len(named)
    assert "computed wrongly" in ended.stdout + ended.stderr
