"""A guest is one line: a model that is built after the script's own seed begins with the weights it always had."""

import os
import re
from pathlib import Path

import pytest

from commands import completed, python

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.slow]  # the quick one: test_run_of_script.py

SCRIPT = Path(__file__).parent / "scripts" / "first_weights.py"


@pytest.mark.parametrize("guest", ["keras", "lightning", "accelerate", "transformers"])
def test_the_first_weights_are_those_of_the_framework_alone_on_any_number_of_workers(
    guest: str, tmp_path: Path
) -> None:
    told = {**os.environ, "KERAS_BACKEND": "torch"}
    alone = python(SCRIPT, guest, "alone", env=told, cwd=tmp_path)
    expected = re.findall("FIRST (.*)", alone.stdout)
    assert len(expected) == 1, alone.stderr
    for workers in (1, 2, 3):
        folder = tmp_path / f"run-{workers}"
        words = ("run", "-n", workers, "--run-dir", folder, SCRIPT, guest)
        done = completed(*words, timeout=120, cwd=tmp_path, env=told)
        assert re.findall("FIRST (.*)", done.stdout) == expected * workers, done.stdout + done.stderr
