"""Loaders and streams on real workers: the bits of the serial run, with a worker killed on the way.

Any number of workers, kills at many places, and runs that go on: ``test_loaders.py`` and ``test_stream_jobs.py``.
"""

from pathlib import Path
from typing import Any

import pytest

import outcomes
from serial_runs import SerialRuns

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm")]

SCRIPTS = Path(__file__).parent / "scripts"
JOBS: dict[str, tuple[str, dict[str, str]]] = {
    "a batch sampler": ("loaders.py", {"SAMPLER": "buckets", "LOADERS": "1"}),
    "a stream": ("streams.py", {"STREAM": "split"}),
    "a stream with readers of its own": ("streams.py", {"STREAM": "own"}),
}
KILL = "[[fault]]\nkind = 'kill'\nrank = 1\nat_step = 4\n"


@pytest.fixture(scope="session")
def serial(serial_runs: SerialRuns) -> dict[str, Any]:
    runs = {name: serial_runs(SCRIPTS / script, **settings) for name, (script, settings) in JOBS.items()}
    return {name: outcomes.outcome_in(run.run_dir) for name, run in runs.items()}


@pytest.mark.parametrize("job", JOBS)
def test_weights_are_those_of_the_serial_run(job: str, serial: dict[str, Any], tmp_path: Path) -> None:
    script, settings = JOBS[job]
    faults, folder = tmp_path / "faults.toml", tmp_path / "run"
    faults.write_text(KILL)
    options = ("-n", "3", "--max-restarts", "2", "--faults", str(faults))
    ended = outcomes.train(folder, *options, script=SCRIPTS / script, settings=settings)
    assert outcomes.outcome(folder, ended) == serial[job]
    assert '"lost"' in (folder / "journal.jsonl").read_text()
