"""Loaders and streams on real workers: the bits of the serial run, with a worker killed on the way.

Any number of workers, kills at many places, and runs that go on: ``test_loaders.py`` and ``test_stream_jobs.py``.
"""

from pathlib import Path

import pytest

import outcomes
from serial_runs import SerialRuns

pytestmark = [
    pytest.mark.procs,
    pytest.mark.slow,  # tests/unit/test_stream_jobs.py has them on threads
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("warm", "serial_launches"),
]

SCRIPTS = Path(__file__).parent / "scripts"
JOBS: dict[str, tuple[str, dict[str, str]]] = {
    "a batch sampler": ("loaders.py", {"SAMPLER": "buckets", "LOADERS": "1"}),
    "a stream": ("streams.py", {"STREAM": "split"}),
    "a stream with readers of its own": ("streams.py", {"STREAM": "own"}),
}
KILL = "[[fault]]\nkind = 'kill'\nrank = 1\nat_step = 4\n"


@pytest.mark.parametrize("job", JOBS)
def test_weights_are_those_of_the_serial_run(job: str, serial_runs: SerialRuns, tmp_path: Path) -> None:
    script, settings = JOBS[job]
    serial = serial_runs(SCRIPTS / script, **settings)
    faults, folder = tmp_path / "faults.toml", tmp_path / "run"
    faults.write_text(KILL)
    options = ("-n", "3", "--max-restarts", "2", "--faults", str(faults))
    ended = outcomes.train(folder, *options, script=SCRIPTS / script, settings=settings)
    assert outcomes.outcome(folder, ended) == outcomes.outcome_in(serial.run_dir)
    assert '"lost"' in (folder / "journal.jsonl").read_text()
