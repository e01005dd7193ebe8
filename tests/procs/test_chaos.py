"""`unisono chaos`: a job with random faults ends with the weights and the samples of one without."""

import json
import os
import shutil
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commands import python
from forks.client import SHARED_FORK_SERVERS
from serial_runs import SerialRuns
from training import SCRIPT
from unisono_lab.faults.faults import Faults

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

PATIENCE_S = 280.0


def chaos(
    folder: Path, *options: str, script: Path = SCRIPT, **settings: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    # What shared fork servers fork is not below its agent, and has not the mark of the job in its first environment.
    kept = (name for name in os.environ if not name.startswith("UNISONO_") and name != SHARED_FORK_SERVERS)
    environment = {name: os.environ[name] for name in kept} | settings
    words = ("-m", "unisono", "chaos", script, "--run-dir", folder, *options)
    ended = python(*words, env=environment, timeout=PATIENCE_S)
    report = folder / "chaos.json"
    return ended, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.slow
def test_nobody_can_tell_a_job_that_was_struck_from_one_that_was_left_alone(tmp_path: Path) -> None:
    ended, report = chaos(tmp_path / "chaos", "--seed", "8", "--faults", "9", "-n", "1:3", EPOCHS="12", PACE_S="0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed" in ended.stdout
    assert report["passed"]
    assert report["digest"] == report["serial_digest"]
    planned = tomllib.loads((tmp_path / "chaos" / "faults.toml").read_text())["fault"]
    assert len({fault["kind"] for fault in planned}) == len(planned) == 9  # one of each kind
    # Those in a recovery strike only if one comes to their point.
    certain = Counter(fault["kind"] for fault in planned if "during" not in fault)
    assert all(report["struck"].get(kind, 0) >= count for kind, count in certain.items()), report
    assert report["starts"] > 1, "an agent was killed"
    assert report["generations"] > 3


@pytest.mark.slow
def test_weights_that_differ_are_found(serial_runs: SerialRuns, tmp_path: Path) -> None:
    alone = serial_runs(SCRIPT, PACE_S="0", EPOCHS="2", UNISONO_SAMPLES="1")
    shutil.copytree(alone.run_dir, tmp_path / "chaos" / "serial")  # as another try in this folder would have left it
    (tmp_path / "chaos" / "serial.json").write_text(json.dumps({"argv": [str(SCRIPT)]}))
    script = tmp_path / "flip.toml"
    script.write_text(Faults().resize(workers=1, at_step=1).flip_bit(rank=0, at_step=8).to_toml())
    options = ("-n", "1:2", "--script", str(script))
    ended, report = chaos(tmp_path / "chaos", *options, PACE_S="0", EPOCHS="2", UNISONO_VERIFY_EVERY="0")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED" in ended.stdout
    assert "the result of the job without faults is taken from" in ended.stderr
    assert report["digest"] != report["serial_digest"] == alone.end()
    assert not report["passed"]


def test_a_script_that_fails_by_itself_is_no_case_for_faults(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("int('none')")
    ended, _ = chaos(tmp_path / "chaos", "-n", "1:2", script=script)
    assert ended.returncode == 2
    assert "even without faults" in ended.stderr
    assert "ValueError" in ended.stderr
