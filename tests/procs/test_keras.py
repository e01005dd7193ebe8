"""Keras' fit in real processes, and where there is no Keras that can be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outcomes import outcome, outcome_in, train
from serial_runs import SerialRuns

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parent / "scripts" / "keras_training.py"


@pytest.mark.slow  # tests/unit/test_keras.py has the kills, and tests/procs/test_readme.py Keras in processes
@pytest.mark.usefixtures("warm", "serial_launches")
def test_weights_are_the_same_in_processes_of_which_one_is_killed(serial_runs: SerialRuns, tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text("[[fault]]\nkind = 'kill'\nrank = 1\nat_step = 9\n")
    done = train(tmp_path / "run", "-n", "2", "--max-restarts", "3", "--faults", str(faults), script=SCRIPT)
    assert outcome(tmp_path / "run", done) == outcome_in(serial_runs(SCRIPT).run_dir)
    assert '"event": "lost"' in (tmp_path / "run" / "journal.jsonl").read_text()


def test_keras_is_not_loaded_by_itself_and_another_backend_is_refused() -> None:
    script = "import sys, unisono; assert 'keras' not in sys.modules; unisono.keras"
    environment = {**os.environ, "KERAS_BACKEND": "numpy"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert "JobError: unisono.keras needs Keras on torch" in done.stderr
    assert "set the environment variable KERAS_BACKEND=torch" in done.stderr
