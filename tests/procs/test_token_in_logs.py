"""With every logger at its lowest level, in every process of a job, nobody writes the token down."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from training import PATIENCE_S, SCRIPT
from unisono.membership.token import read_token, token_file

pytestmark = [pytest.mark.procs, pytest.mark.slow]

SITE = """
import logging, sys

class Loud(logging.Logger):
    def __init__(self, name, level=1):
        super().__init__(name, 1)

logging.setLoggerClass(Loud)
logging.basicConfig(level=1, stream=sys.stderr, force=True, format="LOUD %(name)s %(levelname)s %(message)s")
for name in ("websockets", "websockets.client", "websockets.server", "uvicorn", "uvicorn.error", "uvicorn.asgi"):
    logging.getLogger(name).setLevel(1)
"""
"""What Python runs before anything else, in the launcher, the coordinator, the agent and the workers."""


def test_no_file_of_a_job_holds_its_token(tmp_path: Path) -> None:
    site, run, output = tmp_path / "site", tmp_path / "run", tmp_path / "output.txt"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    environment = {**os.environ, "PYTHONPATH": str(site), "PACE_S": "0", "EPOCHS": "1", "FAULTS": "[]"}
    command = [sys.executable, "-m", "unisono", "run", "-n", "1:2", "--run-dir", str(run), str(SCRIPT)]

    with output.open("wb") as file:
        ended = subprocess.run(
            command, env=environment, stdout=file, stderr=file, timeout=PATIENCE_S, check=False, cwd=tmp_path
        )

    assert ended.returncode == 0, output.read_text()
    secret = read_token(token_file(run)).encode()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != token_file(run)]
    loud = {path.name for path in files if b"LOUD asyncio DEBUG" in path.read_bytes()}
    assert {"output.txt", "coordinator.log"} <= loud, f"only {loud} were at their lowest level"
    assert any(re.match(r"worker-|rank-|w\d", name) for name in loud), f"only {loud} were at their lowest level"
    assert [path for path in files if secret in path.read_bytes()] == []
