"""The page of a run whose process may open few files, while more call it than it can accept."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.procs

PATIENCE_S = 60.0
FEW = 40
ONE_LINE = 120
"""Bytes of a line."""


def test_a_page_that_can_accept_nobody_says_so_in_one_line_and_not_in_a_full_log(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({}))
    command = [sys.executable, "-m", "unisono", "page", str(tmp_path), "--parent", str(os.getpid())]
    with (tmp_path / "log").open("wb") as log, ExitStack() as held:
        page = held.enter_context(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FEW, FEW)),  # noqa: PLW1509 (no threads)
            )
        )
        held.callback(page.kill)
        assert page.stdout is not None
        link = urlsplit(page.stdout.readline().decode())
        for _ in range(2 * FEW):
            held.enter_context(socket.create_connection((link.hostname, link.port), PATIENCE_S))
        until = time.monotonic() + PATIENCE_S
        while not (tmp_path / "log").stat().st_size and time.monotonic() < until:
            time.sleep(0.01)
        page.terminate()
        page.wait(PATIENCE_S)
    assert "Too many open files" in (tmp_path / "log").read_text()
    assert (tmp_path / "log").stat().st_size < ONE_LINE
