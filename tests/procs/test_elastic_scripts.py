"""Scripts that do more than train, while workers die, fail and come; the bits are those of the serial run.

At more places, and with other numbers of workers: ``tests/unit/test_scripts_of_clusters.py``.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from training import EARLY, PATIENCE_S, Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]


def at(place: str, step: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"place": place, "step": step, "rank": rank, **more}


@pytest.mark.slow  # workers that are threads show it in each suite
def test_a_loop_that_is_left_early_while_a_joiner_comes_is_left_by_all(
    stopped_early: Trained, started: list[Training], tmp_path: Path
) -> None:
    workers, before_its_end, steps = 1, 12, stopped_early.steps
    left = len(steps) - 10  # the last of the first loop; two of five steps each follow
    assert 12 < left < 150, "it is meant to stop early, but not at once"
    faults = [
        at("begin", 0, signal=f"resize {workers}"),
        at("begin", left - before_its_end, signal=f"resize {workers + 1}"),
    ]
    started.append(Training(tmp_path / "run", "-n", f"{workers}:{workers + 1}", faults=faults, PACE_S="0.01", **EARLY))
    assert started[0].end() == stopped_early.end()
    assert started[0].steps == steps
    assert started[0].said == stopped_early.said


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


def test_an_exception_that_happens_once_changes_no_bit_where_workers_restart(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults = [at("between", 9, rank=1, signal="raise")]
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
    faults = [at("write", 8), at("write", 16)]
    options = ("-n", "3", "--max-restarts", "3", "--checkpoint-every", "8")
    started.append(Training(tmp_path / "run", *options, faults=faults))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == 2
    assert started[0].steps == serial.steps


@pytest.mark.slow
def test_the_main_worker_is_lost_in_a_checkpoint_that_the_script_asked_for(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults = [at("write", 12)]
    started.append(Training(tmp_path / "run", "-n", "3", "--max-restarts", "3", faults=faults, ASKED="11"))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == 1
    assert started[0].steps == serial.steps


@pytest.mark.slow
def test_the_main_worker_is_lost_in_the_last_checkpoint(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    last = len(serial.steps)
    options = ("-n", "2", "--max-restarts", "3", "--checkpoint-every", "1000")
    started.append(Training(tmp_path / "run", *options, faults=[at("write", last)]))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == 1
    assert started[0].journal("checkpoint")[-1]["step"] == last
    assert started[0].journal("finished")[-1]["step"] == last


@pytest.mark.slow
def test_workers_die_in_each_loop_and_in_each_evaluation_and_others_take_their_places(
    serial: Trained, started: list[Training], tmp_path: Path
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
    options = ("-n", "3", "--max-restarts", "9")
    started.append(Training(tmp_path / "run", *options, faults=faults, PACE_S="0.02"))
    assert started[0].end() == serial.end()
    assert len(started[0].journal("lost")) == len(faults)
    assert started[0].steps == serial.steps
    assert started[0].said == serial.said
