"""Loaders and streams on real workers: the bits of the serial run, with a worker killed on the way.

Any number of workers, kills at many places, and runs that go on: ``test_loaders.py`` and ``test_stream_jobs.py``.
"""

from pathlib import Path

import pytest

import outcomes
from serial_runs import SerialRuns
from unisono_lab.faults.faults import Faults

pytestmark = [
    pytest.mark.procs,
    pytest.mark.slow,  # tests/unit/test_stream_jobs.py has them on threads
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("warm", "serial_launches"),
]

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        ("streams.py", {"STREAM": "split"}),
        ("loaders.py", {"SAMPLER": "buckets", "LOADERS": "1"}),
    ],
)
def test_weights_are_those_of_the_serial_run(
    script: str, settings: dict[str, str], serial_runs: SerialRuns, tmp_path: Path
) -> None:
    serial, folder = serial_runs(SCRIPTS / script, **settings), tmp_path / "run"
    kill = outcomes.struck_by(folder, Faults().kill(rank=1, at_step=4))
    options = ("-n", "3", "--max-restarts", "2", *kill)
    ended = outcomes.train(folder, *options, script=SCRIPTS / script, settings=settings)
    assert outcomes.outcome(folder, ended) == outcomes.outcome_in(serial.run_dir)
    assert '"lost"' in (folder / "journal.jsonl").read_text()
