"""The check of a GPU, small and on the simulated accelerator: each of its parts is done."""

import json
import os
from pathlib import Path

import pytest

import simulated_accelerator
from benchmarks.gpu_check.checks import Checks
from benchmarks.gpu_check.parts import Row, table
from benchmarks.gpu_check.processes import Setting
from commands import python

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600), pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_each_part_of_the_check_has_a_row_and_none_fails(tmp_path: Path) -> None:
    try:
        simulated_accelerator.built()
    except simulated_accelerator.NoCompiler as why:
        pytest.skip(str(why))
    own = (str(ROOT / "tests"), str(ROOT / "tests" / "warm"))
    paths = os.pathsep.join(filter(None, (*own, os.environ.get("PYTHONPATH"))))
    words = ("-m", "benchmarks.gpu_check", "--simulated", "--small", "--patience", 4, "--output", tmp_path)
    done = python(*words, cwd=ROOT, timeout=590, is_merged=True, PYTHONPATH=paths)
    assert done.returncode == 0, done.stdout
    rows = json.loads((tmp_path / "gpu-check.json").read_text())
    parts = [part.name for part in Checks(Setting(None, True, tmp_path)).parts()]
    assert list(dict.fromkeys(row["part"] for row in rows)) == parts
    results = {f"{row['part']}: {row['check']}": row["result"] for row in rows}
    assert not {"different", "failed"} & {*results.values()}, done.stdout
    skipped = {name for name, result in results.items() if result == "skipped"}
    assert skipped == {
        "a share of the device: 50 percent, by MPS",
        "a share of the device: half of it, by a green context",
        "NCCL: mlp on 2 workers, without MPS",
    }
    # The simulated one refuses two workers on one device, as NCCL does below 2.30: they have come to it.
    assert all("Duplicate GPU detected" in row["note"] for row in rows if row["part"] == "NCCL")
    assert all("fakegpu:0" in row["note"] for row in rows if row["part"] == "digests")
    assert table([Row(**row) for row in rows]) in done.stdout
