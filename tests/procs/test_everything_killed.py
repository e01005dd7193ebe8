"""Everything is killed at once, and started again with other workers: nothing is lost but the newest steps."""

from functools import partial
from pathlib import Path

import pytest

from training import Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

EVERY = 4


SIZES = [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 3), (3, 2), (2, 5))]


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_a_job_whose_machine_went_down_goes_on_from_its_newest_checkpoint(
    before: int, after: int, serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    options = ("--max-restarts", "1", "--checkpoint-every", f"{EVERY}")
    started.append(Training(tmp_path / "run", "-n", f"{before}", *options, PACE_S="0.03"))
    started[0].until("checkpoint", step=2 * EVERY)
    started[0].until_step(2 * EVERY + 1)
    started[0].kill_everything()
    kept = max(line["step"] for line in started[0].journal("checkpoint"))
    done = len(started[0].steps)
    started.append(Training(tmp_path / "run", "-n", f"{after}", *options, PACE_S="0"))
    assert started[1].end() == serial.end()
    (resumed,) = started[1].journal("resumed")
    assert resumed["world_size"] == after
    assert kept <= resumed["step"] <= done
    assert done - resumed["step"] <= EVERY  # what is computed again
    assert started[1].steps == serial.steps
    assert started[1].said[-1] == serial.said[-1]


@pytest.mark.slow
def test_everything_killed_before_the_first_checkpoint_begins_anew(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    started.append(Training(tmp_path / "run", "-n", "2", "--max-restarts", "1", PACE_S="0.03"))
    started[0].until_step(3)
    started[0].kill_everything()
    started.append(Training(tmp_path / "run", "-n", "3", "--max-restarts", "1", PACE_S="0"))
    assert started[1].end() == serial.end()
    assert started[1].steps == serial.steps


def has_kept(training: Training, step: int) -> bool:
    """Whether there is a checkpoint of this step, or of a later one."""
    return any(line["step"] >= step for line in training.journal("checkpoint"))


def test_a_job_survives_that_everything_is_killed_again_and_again(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    for workers, step in ((2, 6), (3, 13), (1, 21)):
        options = ("-n", f"{workers}", "--max-restarts", "1", "--checkpoint-every", "2")
        started.append(Training(tmp_path / "run", *options, PACE_S="0.02"))
        started[-1].until_so(partial(has_kept, started[-1], step - 2), f"a checkpoint after step {step - 2}")
        started[-1].until_step(step)
        started[-1].kill_everything()
    started.append(Training(tmp_path / "run", "-n", "2", "--max-restarts", "1", PACE_S="0"))
    assert started[-1].end() == serial.end()
    assert [line["world_size"] for line in started[-1].journal("resumed")] == [3, 1, 2]
    assert started[-1].steps == serial.steps
