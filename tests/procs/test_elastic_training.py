"""Workers die, come and go while a script trains; the weights are those of the undisturbed serial run, bit for bit.

At more places, and with other numbers of workers: ``tests/unit/test_scripts_of_clusters.py``.
"""

from pathlib import Path

import pytest

from serial_runs import SerialRuns
from training import PATIENCE_S, SCRIPT, Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]


@pytest.fixture(scope="session")
def long(serial_runs: SerialRuns) -> Trained:
    """The undisturbed run of one worker with twice the epochs."""
    return serial_runs(SCRIPT, PACE_S="0", EPOCHS="12")


@pytest.mark.slow
def test_killing_all_but_one_worker_anywhere_in_a_step_changes_no_bit(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    places = ["first", "between", "second", "after"]
    faults = [{"place": place, "step": 2 + 5 * number, "rank": number % 2} for number, place in enumerate(places)]
    workers = 1 + len(places)
    started.append(Training(tmp_path / "run", "-n", f"{workers}", "--max-restarts", "9", faults=faults, PACE_S="0"))
    training = started[0]
    assert training.end() == serial.end()
    assert len(training.journal("lost")) == len(faults)
    assert training.steps == serial.steps
    assert training.said == serial.said


def test_growing_and_shrinking_changes_no_bit(long: Trained, started: list[Training], tmp_path: Path) -> None:
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
def test_over_sockets_whose_keys_the_coordinator_hands_out_a_loss_changes_no_bit(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults = [{"place": "first", "step": 3, "rank": 1}]
    options = ("-n", "3", "--max-restarts", "2")
    started.append(Training(tmp_path / "run", *options, faults=faults, UNISONO_TRANSPORT="sockets"))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_a_server_that_is_killed_takes_nothing_with_it(
    transport: str, serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults = [
        {"place": "between", "step": 3, "rank": 2},  # the server
        {"place": "after", "step": 6, "rank": 1, "size": 2},  # whoever serves then: one is left, who computes
        {"place": "first", "step": 9, "rank": 0},
    ]
    options = ("-n", "3", "--max-restarts", "9", "--strategy", "parameter-server:servers=1")
    started.append(Training(tmp_path / "run", *options, faults=faults, UNISONO_TRANSPORT=transport))
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
