"""Workers of several devices, with slices or stages, come and go; the weights are those of one undisturbed device."""

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forks.commands import start
from serial_runs import SerialRuns
from training import PATIENCE_S, SCRIPT, Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(400)]

TWO = ("--devices-per-worker", "2")

LONG: Any = {"EPOCHS": "12"}

WAYS: Any = {"slices": {}, "stages": {"STAGES": "1f1b"}, "matrices": {"MATRICES": "1"}}


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=pytest.mark.slow) for name in ("slices", "stages", "matrices")],
)
def way(request: pytest.FixtureRequest) -> Any:
    """How a model lies on several devices."""
    return WAYS[request.param]


@pytest.fixture(scope="session")
def whole(way: Any, serial_runs: SerialRuns) -> Trained:
    """The undisturbed run of one worker of one device."""
    return serial_runs(SCRIPT, PACE_S="0", **way)


@pytest.fixture(scope="session")
def long(way: Any, serial_runs: SerialRuns) -> Trained:
    """The same with twice the epochs."""
    return serial_runs(SCRIPT, PACE_S="0", **LONG, **way)


def test_a_device_that_dies_anywhere_costs_its_worker_and_no_bit(
    way: Any, whole: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults: list[dict[str, Any]] = [
        {"place": "first", "step": 2, "rank": 1, "device": 1},  # in a pass, for which the first one waits
        {"place": "act worked out", "step": 6, "rank": 0, "device": 1},  # of the main worker, which says no more
        {"place": "act counted", "step": 10, "later": True, "rank": 1, "device": 0},
    ]
    options = ("-n", "3", "--max-restarts", "9", *TWO)
    started.append(Training(tmp_path / "run", *options, faults=faults, PACE_S="0", **way))
    training = started[0]
    assert training.end() == whole.end()
    assert len(training.journal("lost")) == len(faults)
    assert training.steps == whole.steps
    assert training.said == whole.said


@pytest.mark.slow
def test_devices_that_die_while_others_recover_change_no_bit(
    way: Any, whole: Trained, started: list[Training], tmp_path: Path
) -> None:
    drawn = random.Random(0)
    points = ["regroup begins", "generation formed", "state captured", "state received", "state taken", "engine made"]
    drawn.shuffle(points)
    faults: list[dict[str, Any]] = [
        {"place": "first", "step": 2 + 4 * number, "rank": drawn.randrange(3), "device": drawn.randrange(2)}
        for number in range(6)
    ]
    faults += [
        {"place": point, "step": 2, "later": True, "rank": number % 2, "device": drawn.randrange(2), "behind": number}
        for number, point in enumerate(points)
    ]
    options = ("-n", "3", "--max-restarts", "40", *TWO)
    started.append(Training(tmp_path / "run", *options, faults=faults, PACE_S="0.004", **way))
    training = started[0]
    assert training.end() == whole.end()
    assert training.steps == whole.steps


@pytest.mark.slow
def test_workers_of_two_devices_come_and_go_and_go_on_with_one_and_three(
    way: Any, long: Trained, started: list[Training], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    started.append(Training(run_dir, "-n", "1:3", *TWO, PACE_S="0.2", **LONG, **way))
    training = started[0]
    training.until("minted", generation=1)
    for workers in (3, 2):  # in the order in which they have come up
        training.ask("resize", str(workers))
        training.until_so(lambda: len(training.journal("minted")[-1]["workers"]) == workers, f"{workers} workers")  # noqa: B023
    training.ask("stop")
    assert training.process.wait(PATIENCE_S) == 75
    for devices in ("3", "1"):
        started.append(Training(run_dir, "-n", "1:2", "--devices-per-worker", devices, PACE_S="0.02", **LONG, **way))
        started[-1].until("minted", generation=1)
        if devices == "3":
            started[-1].until_so(lambda: len(started[-1].journal("resumed")) == 1, "resumed")
            started[-1].ask("stop")
            assert started[-1].process.wait(PATIENCE_S) == 75
    started[-1].hurry()
    assert started[-1].end() == long.end()
    assert training.steps == long.steps


@pytest.mark.slow
def test_a_device_that_dies_in_the_middle_of_a_checkpoint_leaves_the_older_one(
    way: Any, whole: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults = [{"place": "checkpoint share written", "step": 6, "later": True, "rank": 0, "device": 1}]
    options = ("-n", "1", "--max-restarts", "3", "--checkpoint-every", "3", *TWO)
    started.append(Training(tmp_path / "run", *options, faults=faults, PACE_S="0", **way))
    assert started[0].end() == whole.end()
    (resumed,) = started[0].journal("resumed")
    assert resumed["step"] == 3
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
def test_a_device_that_hangs_costs_its_worker(
    way: Any, whole: Trained, started: list[Training], tmp_path: Path
) -> None:
    faults = [{"place": "between", "step": 4, "rank": 1, "device": 1, "signal": "SIGSTOP"}]
    options = ("-n", "2", "--max-restarts", "3", "--failure-timeout-s", "3", *TWO)
    started.append(Training(tmp_path / "run", *options, faults=faults, PACE_S="0", **way))
    assert started[0].end() == whole.end()
    assert len(started[0].journal("lost")) == 1


@pytest.mark.slow
def test_whoever_joins_takes_the_number_of_devices_from_the_job_or_is_refused(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    run_dir, said = tmp_path / "run", tmp_path / "joining.txt"
    started.append(Training(run_dir, "-n", "1:3", "--here", "1", *TWO, PACE_S="0.5"))
    started[0].until("minted", generation=1)

    def join(*options: str) -> Any:
        with said.open("wb") as output:
            words = ("join", "--run-dir", str(run_dir), *options, str(SCRIPT))
            return start(*words, env={**os.environ, "PACE_S": "0"}, stdout=output, stderr=subprocess.STDOUT)

    assert join("--devices-per-worker", "3").wait(PATIENCE_S) == 1
    assert "start them there with --devices-per-worker 2" in said.read_text()
    joining = join()
    started[0].until_so(lambda: any(len(one["workers"]) == 2 for one in started[0].journal("minted")), "two workers")
    started[0].hurry()
    assert started[0].end() == serial.end()
    assert joining.wait(PATIENCE_S) == 0
