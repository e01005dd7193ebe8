"""Everything is killed at once, and started again with other workers: nothing is lost but the newest steps."""

from pathlib import Path

import pytest

from training import Trained, Training

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]

EVERY = 2
"""So many steps a checkpoint is written."""


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


def kept(training: Training) -> int:
    """The newest checkpoint that the journal tells of."""
    return max((line["step"] for line in training.journal("checkpoint")), default=0)


def test_a_job_whose_machine_goes_down_again_and_again_goes_on_from_its_newest_checkpoint(
    serial: Trained, started: list[Training], tmp_path: Path
) -> None:
    most = []
    for workers, step in ((2, 6), (3, 13), (1, 21)):
        options = ("-n", f"{workers}", "--max-restarts", "1", "--checkpoint-every", f"{EVERY}")
        started.append(training := Training(tmp_path / "run", *options, PACE_S="0.02"))
        training.until_so(lambda: kept(training) >= step - 2, f"a checkpoint after step {step - 2}")  # noqa: B023
        training.until_step(step)
        training.kill_everything()
        most.append((kept(training), len(set(training.steps))))
    started.append(Training(tmp_path / "run", "-n", "2", "--max-restarts", "1", PACE_S="0"))
    assert started[-1].end() == serial.end()
    resumed = started[-1].journal("resumed")
    assert [line["world_size"] for line in resumed] == [3, 1, 2]
    for line, (checkpoint, done) in zip(resumed, most, strict=True):
        assert checkpoint <= line["step"] <= done
        assert done - line["step"] <= 2 * EVERY  # what is computed again; the newest may not have been written yet
    assert started[-1].steps == serial.steps
    assert started[-1].said[-1] == serial.said[-1]
