"""A policy cuts batches finer and coarser: the same bits on any number of workers and whatever happens to them."""

from pathlib import Path
from typing import Any

import pytest

from script_cluster import Cluster, Done, Kill
from unisono.errors import PolicyError
from unisono_lab.faults.samples import Samples, problems

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "finer.py"
SHARDS = 6
"""Of the job."""

KILLS = [Kill(4, 0), Kill(8, 1, 3), Kill(13, 0, 1), Kill(16, 1, 5), Kill(20, 0, 12), Kill(25, 1, 30)]
"""At boundaries where the shards change, and others."""


def train(cluster: Cluster, workers: int | tuple[int, int], **how: Any) -> Done:
    return cluster(SCRIPT, workers, shards=SHARDS, UNISONO_SAMPLES="1", **how)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return train(Cluster(tmp_path_factory.mktemp("serial")), 1)


def test_alone_the_batches_have_the_shapes_that_were_decided_and_every_sample_is_used_once(serial: Done) -> None:
    seen = [(line["batch_size"], line["shards"]) for line in serial.metrics.values()]
    assert seen[0] == (96, 12)
    assert {shards for _, shards in seen} == {6, 12, 24, 30, 36}
    assert [line["shards"] for line in serial.journal("decided") if line["step"] == 4 and "shards" in line] == [24]
    assert [line["position"] for line in serial.metrics.values()] == [
        sum(size for size, _ in seen[:step]) for step in range(len(seen))
    ]
    assert problems(Samples.read(serial.folder), len(seen), SHARDS) == []


def test_weights_metrics_and_decisions_are_the_same_on_three_workers(serial: Done, tmp_path: Path) -> None:
    done = train(Cluster(tmp_path), 3)
    assert done.outcome == serial.outcome
    assert len(done.world.formed[0]) == 3
    assert problems(Samples.read(done.folder), len(serial.metrics), SHARDS, Samples.read(serial.folder)) == []


def test_weights_metrics_and_decisions_are_the_same_while_workers_come_and_die(serial: Done, tmp_path: Path) -> None:
    done = train(Cluster(tmp_path), (2, 4), kills=KILLS)
    assert done.outcome == serial.outcome
    assert done.world.struck == len(KILLS)
    assert {len(names) for names in done.world.formed} >= {1, 2, 3}
    assert problems(Samples.read(done.folder), len(serial.metrics), SHARDS, Samples.read(serial.folder)) == []


@pytest.mark.slow
def test_a_run_that_is_cut_off_goes_on_with_as_many_shards_on_another_number_of_workers(
    serial: Done, tmp_path: Path
) -> None:
    cluster, folder = Cluster(tmp_path), tmp_path / "run"
    train(cluster, 3, folder=folder, UNISONO_CHECKPOINT_EVERY="1", UNISONO_STOP_AFTER="16")
    assert len(Done.metrics_in(folder)) == 16
    again = train(cluster, 2, folder=folder)
    assert again.outcome == serial.outcome
    assert [line["step"] for line in again.journal("resumed")] == [16]


def test_a_worker_that_decides_another_number_of_shards_is_caught_and_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        train(Cluster(tmp_path), 3, ODD="8")
    assert "the policies decided differently before step 8" in str(caught.value)
    assert "rank 0: finer: set_batch_size(96, shards=6)" in str(caught.value)
    assert "rank 1: finer: set_batch_size(96, shards=18)" in str(caught.value)
