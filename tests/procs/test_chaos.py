"""`unisono chaos`: a job with random faults ends with the weights and the samples of one without."""

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "elastic_training.py"
PATIENCE_S = 280.0


def chaos(folder: Path, *options: str, **settings: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")} | settings
    command = [sys.executable, "-m", "unisono", "chaos", str(SCRIPT), "--run-dir", str(folder), *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    report = folder / "chaos.json"
    return ended, json.loads(report.read_text()) if report.exists() else {}


def test_nobody_can_tell_a_job_that_was_struck_from_one_that_was_left_alone(tmp_path: Path) -> None:
    ended, report = chaos(tmp_path / "chaos", "--seed", "5", "--faults", "12", "-n", "1:3", EPOCHS="16", PACE_S="0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed" in ended.stdout
    assert report["passed"]
    assert report["digest"] == report["serial_digest"]
    planned = tomllib.loads((tmp_path / "chaos" / "faults.toml").read_text())["fault"]
    assert len(planned) == 12
    # Those in a recovery strike only if one comes to their point.
    certain = Counter(fault["kind"] for fault in planned if "during" not in fault)
    assert all(report["struck"].get(kind, 0) >= count for kind, count in certain.items()), report
    assert report["starts"] > 1, "an agent was killed"
    assert report["generations"] > 3


def test_weights_that_differ_are_found(tmp_path: Path) -> None:
    script = tmp_path / "flip.toml"
    script.write_text('[[fault]]\nkind = "resize"\nworkers = 1\nat_step = 1\n'
                      '[[fault]]\nkind = "flip_bit"\nrank = 0\nat_step = 20\n')  # fmt: skip
    options = ("-n", "1:2", "--script", str(script))
    ended, report = chaos(tmp_path / "chaos", *options, PACE_S="0", UNISONO_VERIFY_EVERY="0")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED" in ended.stdout
    assert not report["passed"]


def test_a_script_that_fails_by_itself_is_no_case_for_faults(tmp_path: Path) -> None:
    ended, _ = chaos(tmp_path / "chaos", "-n", "1:2", EPOCHS="none")
    assert ended.returncode == 2
    assert "even if nothing disturbs it" in ended.stderr
    assert "ValueError" in ended.stderr
