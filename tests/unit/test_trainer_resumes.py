"""What a trainer adds up over an epoch is state: who resumes, joins or takes over in mid-epoch decides alike by it."""

from pathlib import Path
from typing import Any

import pytest

from script_cluster import Cluster, Done, Flip, Kill

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "plateau.py"


def train(folder: Path, workers: int | tuple[int, int], kills: tuple[Kill, ...] = (), **settings: Any) -> Done:
    return Cluster(folder)(SCRIPT, workers, shards=2, kills=kills, folder=folder / "run", **settings)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return train(tmp_path_factory.mktemp("serial"), 1)


def test_the_schedule_cuts_the_rate_and_the_training_stops_after_the_epoch(serial: Done) -> None:
    rates = [line.split()[-1] for line in serial.said if line.startswith("epoch")]
    assert len(rates) == 5
    assert len(set(rates)) > 1


def test_a_worker_that_is_lost_and_replaced_in_mid_epoch_changes_nothing(serial: Done, tmp_path: Path) -> None:
    done = train(tmp_path, (2, 2), kills=(Kill(6, 0), Kill(10, 1), Kill(18, 0, 2)))
    assert done.said == serial.said
    assert done.world.struck == 3


@pytest.mark.parametrize("steps", [7, 18])
def test_a_run_that_resumes_in_mid_epoch_goes_on_with_the_epochs_means(
    steps: int, serial: Done, tmp_path: Path
) -> None:
    train(tmp_path, 1, UNISONO_CHECKPOINT_EVERY="1", UNISONO_STOP_AFTER=f"{steps}")
    done = train(tmp_path, 2)
    assert done.digest == serial.digest
    assert {line for line in done.said if line.startswith("epoch")} <= set(serial.said)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "flip", [Flip(6, "step_begins"), Flip(8, "step_begins"), Flip(17, "step_computed"), Flip(19, "step_ends")]
)
def test_a_fault_of_the_memory_sets_the_epochs_means_back(
    flip: Flip, workers: int, serial: Done, tmp_path: Path
) -> None:
    done = train(tmp_path, workers, flips=[flip])
    assert not done.world.flips
    assert done.journal("rolled back") or done.journal("computed again") or done.journal("healed")
    assert set(serial.said) <= set(done.said)  # an epoch that was computed wrongly has said so, too
    assert (done.digest, done.metrics) == (serial.digest, serial.metrics)
