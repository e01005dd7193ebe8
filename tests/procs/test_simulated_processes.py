"""Simulated seeds are shared out to processes, which never outlive the command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.procs, pytest.mark.slow]

PATIENCE_S = 60.0

ENDLESS = """
[work]
samples = 100_000_000
batch_size = 1
shards = 1

[step]
a_c = 0.5

[[hosts]]
name = "steady"
count = 1
workers = 1
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_a_search_that_is_ended_leaves_no_process_and_no_traceback(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.toml").write_text(ENDLESS)
    options = ("--minimise", "cost", "--seeds", "100000", "--processes", "2")
    words = [sys.executable, "-m", "unisono", "simulate", "job.toml", *options]
    with (tmp_path / "err.txt").open("w") as err:
        process = subprocess.Popen(words, cwd=tmp_path, stdout=err, stderr=err, start_new_session=True)
    found: list[psutil.Process] = []
    try:
        begun = time.monotonic()
        while len(found) < 2:
            assert process.poll() is None, (tmp_path / "err.txt").read_text()
            assert time.monotonic() - begun < PATIENCE_S
            time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
            found = [one for one in children if "simulation.simulated_run" in str(one.cmdline())]
        os.killpg(process.pid, signal.Signals[name])  # as a terminal does
        code = process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert not psutil.wait_procs(found, PATIENCE_S)[1]
    assert code == (130 if name == "SIGINT" else -signal.SIGKILL)
    assert "Traceback" not in (tmp_path / "err.txt").read_text()
