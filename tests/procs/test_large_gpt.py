"""The example whose model is too large for the memory of one device: with slices, with stages, and with neither."""

import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "large_gpt.py")
LAUNCHER = ("-m", "unisono", "run", "-n", "1", "--threads", "1", "--devices-per-worker")


def weights(*words: str, folder: Path, most: int) -> str:
    """The digest that Python ends with, of which no process may have so many bytes; empty if there is none."""
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "UNISONO_RUN_DIR": "run", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_DATA, (most, most)),
        text=True,
        timeout=500,
        check=False,
    )
    found = re.findall(r"weights sha256 ([0-9a-f]{64})", done.stdout)
    assert bool(found) == (done.returncode == 0), done.stdout
    assert found or "allocate memory" in done.stdout, done.stdout
    return found[0] if found else ""


@pytest.mark.parametrize(("cut", "devices", "named"), [("slices", "4", 0), ("stages", "2", 1)])
def test_a_model_that_one_process_has_no_room_for_is_trained_by_several(
    cut: str, devices: str, named: int, tmp_path: Path
) -> None:
    kilobytes = re.findall(r"ulimit -d (\d+)", Path(EXAMPLE).read_text())
    most = int(kilobytes[named]) * 1024
    assert not weights(EXAMPLE, "--cut", cut, folder=tmp_path, most=most)
    assert weights(*LAUNCHER, devices, EXAMPLE, "--cut", cut, folder=tmp_path, most=most)
