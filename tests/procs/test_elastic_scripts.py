"""Scripts that do more than train, while workers die, fail and come; the bits are those of the serial run."""

import json
from pathlib import Path
from typing import Any

import pytest

from training import PATIENCE_S, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]


def at(place: str, step: int, rank: int = 0, **more: str) -> dict[str, Any]:
    return {"place": place, "step": step, "rank": rank, **more}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_loop_that_is_left_early_while_a_joiner_comes_is_left_by_all(
    workers: int, started: list[Training], tmp_path: Path
) -> None:
    settings: Any = {"STOP_BELOW": "1.5", "EPOCHS": "40"}
    started.append(Training(tmp_path / "serial", "-n", "1", PACE_S="0", **settings))
    expected, steps = started[0].end(), started[0].steps
    assert 12 < len(steps) < 150, "it is meant to stop early, but not at once"
    started.append(Training(tmp_path / "run", "-n", f"{workers}:{workers + 1}", PACE_S="0.02", **settings))
    training = started[1]
    training.until_step(1)
    training.ask("resize", f"{workers}")
    training.until_step(len(steps) - 12)  # the first loop's last epoch is under way
    training.ask("resize", f"{workers + 1}")
    assert training.end() == expected
    assert training.steps == steps
    assert training.said == started[0].said


def test_an_exception_on_one_worker_ends_the_job_and_names_it(started: list[Training], tmp_path: Path) -> None:
    faults = [at("between", 7, rank=1, signal="raise")]
    started.append(Training(tmp_path / "run", "-n", "3", "--max-restarts", "3", faults=faults))
    assert started[0].process.wait(PATIENCE_S) == 1
    said = started[0].output.read_text()
    assert said.rstrip().endswith("ValueError: boom in between of step 7")
    assert "elastic_training.py" in said
    assert "unisono: worker w2 on host" in said
    error = json.loads((tmp_path / "run" / "result.json").read_text())["error"]
    assert (error["worker"], error["type"]) == ("w2", "ValueError")


@pytest.mark.parametrize("place", ["between", "first", "evaluate"])
def test_an_exception_that_happens_once_changes_no_bit_where_workers_restart(
    place: str, serial: Training, started: list[Training], tmp_path: Path
) -> None:
    faults = [at(place, 9, rank=1, signal="raise")]
    options = ("-n", "2", "--max-restarts", "3", "--restart-on-error")
    started.append(Training(tmp_path / "run", *options, faults=faults))
    assert started[0].end() == serial.end()
    assert "ValueError: boom" in started[0].output.read_text()
    assert [line["worker"] for line in started[0].journal("lost")] == ["w2"]
    assert started[0].steps == serial.steps


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("place", ["capture", "write"])
def test_the_main_worker_is_lost_while_it_writes_a_checkpoint(
    place: str, workers: int, serial: Training, started: list[Training], tmp_path: Path
) -> None:
    faults = [at(place, 8), at(place, 16)]
    options = ("-n", f"{workers}", "--max-restarts", "3", "--checkpoint-every", "8")
    started.append(Training(tmp_path / "run", *options, faults=faults))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == 2
    assert started[0].steps == serial.steps


def test_the_main_worker_is_lost_in_a_checkpoint_that_the_script_asked_for(
    serial: Training, started: list[Training], tmp_path: Path
) -> None:
    faults = [at("write", 12)]
    started.append(Training(tmp_path / "run", "-n", "3", "--max-restarts", "3", faults=faults, ASKED="11"))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == 1
    assert started[0].steps == serial.steps


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("place", ["capture", "write"])
def test_the_main_worker_is_lost_in_the_last_checkpoint(
    place: str, workers: int, serial: Training, started: list[Training], tmp_path: Path
) -> None:
    last = len(serial.steps)
    options = ("-n", f"{workers}", "--max-restarts", "3", "--checkpoint-every", "1000")
    started.append(Training(tmp_path / "run", *options, faults=[at(place, last)]))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == 1
    assert started[0].journal("checkpoint")[-1]["step"] == last
    assert started[0].journal("finished")[-1]["step"] == last


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_workers_die_in_each_loop_and_in_each_evaluation_and_others_take_their_places(
    workers: int, serial: Training, started: list[Training], tmp_path: Path
) -> None:
    last = len(serial.steps)
    second, third = last - 10, last - 5
    faults = [
        at("in evaluate", 0, rank=1),
        at("after", 3, rank=0),
        at("in evaluate", second, rank=1),
        at("begin", second + 2, rank=0),
        at("in evaluate", third, rank=0),
        at("after", third + 2, rank=1),
        at("in evaluate", last, rank=0),
    ]
    options = ("-n", f"{workers}", "--max-restarts", "9")
    started.append(Training(tmp_path / "run", *options, faults=faults, PACE_S="0.02"))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == len(faults)
    assert started[0].steps == serial.steps
    assert started[0].said == serial.said


def test_state_of_the_scripts_own_goes_over_to_those_who_come_when_all_others_go(
    serial: Training, started: list[Training], tmp_path: Path
) -> None:
    started.append(Training(tmp_path / "run", "-n", "1:2", PACE_S="0.03"))
    training = started[0]
    training.until_step(1)
    training.ask("resize", "2")
    training.until("minted", workers=["w1", "w2"])
    training.ask("leave", "w1")
    training.until("minted", workers=["w2"])  # it has only what w1 gave it
    assert training.end() == serial.end()
    assert training.said == serial.said
