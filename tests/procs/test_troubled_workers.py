"""Workers hang, or ask for others that they cannot have.

Workers that hold a wrong bit: ``tests/unit/test_scripts_of_clusters.py``. Slow ones: ``test_straggler.py``.
"""

import json
from pathlib import Path

import pytest

from outcomes import train
from serial_runs import SerialRuns
from training import Trained

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180), pytest.mark.usefixtures("warm")]

SCRIPT = Path(__file__).parent / "scripts" / "troubled.py"


def test_a_worker_that_hangs_says_where_and_is_replaced(serial_runs: SerialRuns, tmp_path: Path) -> None:
    job = Trained(tmp_path / "run")
    trouble = json.dumps([{"what": "hang in a step", "rank": 1, "step": 7}])
    options = ("-n", "3", "--max-restarts", "2", "--failure-timeout-s", "3")
    ended = train(job.run_dir, *options, script=SCRIPT, settings={"TROUBLE": trouble, "TIMEOUT_S": "3"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert job.end() == serial_runs(SCRIPT, PACE_S="0").end()
    (lost,) = job.journal("lost")
    assert "it hangs: no progress for" in lost["why"]
    assert "hang_for_good" in (job.run_dir / "logs" / f"{lost['worker']}.log").read_text()


@pytest.mark.slow
def test_workers_that_stay_the_same_cannot_be_resized_and_say_what_to_do(tmp_path: Path) -> None:
    trouble = json.dumps([{"what": "resize", "rank": 0, "step": 2, "to": 3}])
    ended = train(tmp_path / "run", "-n", "1", script=SCRIPT, settings={"TROUBLE": trouble})
    assert ended.returncode == 2
    assert "unisono run -n 1:3" in ended.stdout + ended.stderr
