"""Workers die, come and go while a script trains; the weights are those of the undisturbed serial run, bit for bit.

At more places, and with other numbers of workers: ``tests/unit/test_scripts_of_clusters.py``.
"""

from pathlib import Path

import pytest

from serial_runs import SerialRuns
from training import PATIENCE_S, SCRIPT, Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]


def test_growing_and_shrinking_changes_no_bit(serial_runs: SerialRuns, started: list[Training], tmp_path: Path) -> None:
    long = serial_runs(SCRIPT, PACE_S="0", EPOCHS="12")
    started.append(Training(tmp_path / "run", "-n", "1:3", "--pin", EPOCHS="12", PACE_S="0.02"))
    training = started[0]
    training.until("minted", generation=1)
    training.ask("resize", "3")
    training.until("minted", workers=["w1", "w2", "w3"])
    training.ask("resize", "1")
    training.until("minted", workers=["w1"])
    training.ask("resize", "2")
    training.hurry()
    assert training.end() == long.end()
    assert training.steps == long.steps


@pytest.mark.slow
def test_a_job_that_is_stopped_goes_on_later_and_ends_with_the_same_bits(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    started.append(Training(tmp_path / "run", "-n", "1:3", PACE_S="0.03"))
    started[0].until("minted", generation=1)
    started[0].ask("stop")
    assert started[0].process.wait(PATIENCE_S) == 75
    assert started[0].journal("preempted")
    started.append(Training(tmp_path / "run", "-n", "3", "--max-restarts", "1", PACE_S="0"))
    assert started[1].end() == serial.end()
    assert started[1].steps == serial.steps


@pytest.mark.slow
def test_an_exception_that_happens_once_changes_no_bit_where_workers_restart(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults = [{"place": "between", "step": 9, "rank": 1, "signal": "raise"}]
    options = ("-n", "2", "--max-restarts", "3", "--restart-on-error")
    started.append(Training(tmp_path / "run", *options, faults=faults))
    assert started[0].end() == serial.end()
    assert "ValueError: boom" in started[0].output.read_text()
    assert [line["worker"] for line in started[0].journal("lost")] == ["w2"]
    assert started[0].steps == serial.steps


@pytest.mark.slow  # tests/unit/test_scripts_of_clusters.py has the capture
def test_the_main_worker_is_lost_while_it_writes_a_checkpoint(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults = [{"place": "write", "step": step, "rank": 0} for step in (8, 16)]
    options = ("-n", "3", "--max-restarts", "3", "--checkpoint-every", "8")
    started.append(Training(tmp_path / "run", *options, faults=faults))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == 2
    assert started[0].steps == serial.steps


@pytest.mark.slow
def test_a_server_that_is_killed_takes_nothing_with_it(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults = [
        {"place": "between", "step": 3, "rank": 2},  # the server
        {"place": "after", "step": 6, "rank": 1, "size": 2},  # whoever serves then: one is left, who computes
        {"place": "first", "step": 9, "rank": 0},
    ]
    options = ("-n", "3", "--max-restarts", "9", "--strategy", "parameter-server:servers=1")
    started.append(Training(tmp_path / "run", *options, faults=faults, UNISONO_TRANSPORT="sockets"))
    training = started[0]
    assert training.end() == serial.end()
    assert len(training.journal("lost")) >= 2
    assert training.steps == serial.steps
    assert training.said == serial.said


@pytest.mark.slow
def test_a_job_that_becomes_too_small_for_its_servers_computes_on_all_workers_and_says_so(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    options = ("-n", "1:3", "--strategy", "parameter-server:servers=2")
    started.append(Training(tmp_path / "run", *options, PACE_S="0.02"))
    training = started[0]
    training.until("minted", generation=1)
    training.ask("resize", "3")
    training.until("minted", workers=["w1", "w2", "w3"])
    training.ask("resize", "2")
    training.until("all compute")
    training.hurry()
    assert training.end() == serial.end()
    assert {one["workers"] for one in training.journal("all compute")} <= {1, 2}
    assert training.journal("all compute")
