"""A cloud takes machines away while a script trains: workers leave in time, and the weights are the serial run's."""

import os
from pathlib import Path

import pytest

from forks.commands import start
from metadata_service import metadata_service
from training import PATIENCE_S, SCRIPT, Trained, Training, control_of

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.slow]


def test_a_job_whose_first_host_is_taken_away_leaves_a_checkpoint_and_goes_on_elsewhere(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    with metadata_service("aws") as service:
        options = ("-n", "2", "--notices", "auto")
        started.append(Training(tmp_path / "run", *options, PACE_S="0.03", **service.variables))
        started[0].until_step(3)
        service.take_away()
        assert started[0].process.wait(PATIENCE_S) == 75, started[0].output.read_text()
    (noted,) = started[0].journal("notice")
    assert noted["words"] == "AWS takes this machine away (terminate) at '2026-11-24T14:22:00Z'"
    assert started[0].journal("preempted")
    started.append(Training(tmp_path / "run", "-n", "2", PACE_S="0"))
    assert started[1].end() == serial.end()
    assert started[1].steps == serial.steps


def test_a_host_that_is_taken_away_leaves_and_the_others_go_on(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    started.append(Training(tmp_path / "run", "-n", "1:2", "--here", "1", PACE_S="0.05"))
    training = started[0]
    training.until("minted", generation=1)
    words = ("join", "-n", "1", "--notices", "azure", "--run-dir", str(training.run_dir), str(SCRIPT))
    with (tmp_path / "join.txt").open("wb") as output, metadata_service("azure") as service:
        told = {**os.environ, **service.variables, "PACE_S": "0.05"}
        host = start(*words, env=told, stdout=output, stderr=output)
        training.until_so(lambda: len(control_of(training.run_dir).status()["members"]) == 2, "two workers")
        service.take_away()
        training.until("left")
        assert host.wait(PATIENCE_S) in (0, 75), (tmp_path / "join.txt").read_text()
    training.hurry()
    assert training.end() == serial.end()
    (asked,) = training.journal("agent asked to leave")
    assert asked["notice"].startswith("Azure takes this machine away (Preempt at ")
    assert training.steps == serial.steps
    assert service.approved
