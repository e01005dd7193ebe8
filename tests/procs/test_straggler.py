"""A worker becomes slow in the middle of a job, and a policy does something about it."""

from pathlib import Path

import pytest

from outcomes import outcome, outcome_in, struck_by, train
from serial_runs import SerialRuns
from training import whole_lines
from unisono_lab.faults.faults import Faults

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm"), pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "slept.py"


def test_a_slow_worker_gets_fewer_shards_and_then_is_replaced_and_the_bits_stay(
    serial_runs: SerialRuns, tmp_path: Path
) -> None:
    serial, nothing = outcome_in(serial_runs(SCRIPT).run_dir)
    assert nothing == []
    folder = tmp_path / "run"
    options = ("-n", "3", "--max-restarts", "3", *struck_by(folder, Faults().slow(rank=1, at_step=5, factor=8)))
    digest, decided = outcome(folder, train(folder, *options, script=SCRIPT, settings={"PACE_S": "0.02"}))
    assert digest == serial
    assert [(policy, verb) for _, policy, verb, _, _ in decided[:2]] == [
        ("straggler", "set_balance"),
        ("straggler", "replace"),
    ]
    assert all(why["times_slower"] > 3 for _, _, _, _, why in decided[:2])
    assert decided[0][4]["rank"] == decided[1][3] == 1
    journal = whole_lines(folder / "journal.jsonl")
    (replaced, *_) = [line for line in journal if line["event"] == "replaced"]
    minted = [line for line in journal if line["event"] == "minted"]
    assert replaced["worker"] in minted[0]["workers"]
    assert any(line["shards"][1] == 1 for line in minted if replaced["worker"] in line["workers"])
    assert len(minted[-1]["workers"]) == 3
    assert replaced["worker"] not in minted[-1]["workers"]
