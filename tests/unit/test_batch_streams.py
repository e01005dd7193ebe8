"""Streams that make their batches themselves: the same bits on any number of workers, whatever happens to them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from script_cluster import Cluster, Done, Kill
from unisono.data.batch_stream import NEWEST, OpenPass, StreamBatch
from unisono.errors import DataError, JobMismatch

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "batch_streams.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("batches"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Done:
    return cluster(SCRIPT, 1, shards=8)


def same(done: Done, serial: Done) -> None:
    assert (done.outcome, done.said) == (serial.outcome, serial.said)


def test_batches_are_those_of_the_stream_and_all_of_them_are_used(serial: Done) -> None:
    sizes = [int(re.findall(r"\d+", line)[1]) for line in serial.said if line.startswith("after step")]
    assert sorted(sizes) == sorted([16, 16, 9, 20, 3, 16] * 5)
    (predicted,) = (line for line in serial.said if line.startswith("after predict"))
    own = torch.Generator().manual_seed(0)
    assert str(torch.randperm(80, generator=own).tolist()) in predicted
    means = [float(mean) for line in serial.said for mean in re.findall(r"'numbers': ([\d.]+)", line)]
    assert means == [pytest.approx(39.5)]  # both times


def test_weights_and_figures_are_the_same_on_three_workers(cluster: Cluster, serial: Done) -> None:
    done = cluster(SCRIPT, 3, shards=8)
    assert (done.outcome, done.said) == (serial.outcome, serial.said)


def test_nothing_shows_that_workers_were_killed_and_others_came(cluster: Cluster, serial: Done) -> None:
    kills = [Kill(2, 1, 5), Kill(7, 0, 0), Kill(13, 2, 5), Kill(17, 0, 5), Kill(23, 1, 5)]
    done = cluster(SCRIPT, 3, shards=8, kills=kills)
    assert len(done.world.formed) > 5
    assert done.outcome == serial.outcome


@pytest.mark.parametrize("stop", [pytest.param(4, marks=pytest.mark.slow), 6, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_resumes_in_the_middle_of_an_epoch_and_at_its_beginning(
    cluster: Cluster, serial: Done, stop: int, tmp_path: Path
) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER=str(stop))
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path)
    assert done.journal("resumed")
    assert done.outcome == serial.outcome


def test_a_stream_that_gives_each_worker_its_own_batches_is_refused(cluster: Cluster) -> None:
    with pytest.raises(JobMismatch, match=r"first batch \(seed what they draw\)"):
        cluster(SCRIPT, 2, shards=8, UNSEEDED="1")


def test_a_run_does_not_go_on_with_other_batches(cluster: Cluster, tmp_path: Path) -> None:
    cluster(SCRIPT, 1, shards=8, folder=tmp_path, UNSEEDED="1", UNISONO_STOP_AFTER="4")
    with pytest.raises(JobMismatch, match="reads other data than when its checkpoint was written"):
        cluster(SCRIPT, 1, shards=8, folder=tmp_path, UNSEEDED="1")


@pytest.mark.parametrize("value", [{}, [torch.tensor(1.0)], [torch.zeros(2), torch.zeros(3, 4)]])
def test_a_batch_has_one_row_for_each_sample(value: Any) -> None:
    with pytest.raises(DataError, match="each array needs one row for each sample"):
        StreamBatch.of(value, "the stream")


def test_batches_that_have_the_same_rows_in_another_order_are_told_apart() -> None:
    rows = torch.arange(8.0).view(4, 2)
    assert StreamBatch.of(rows, "").digest != StreamBatch.of(rows.flip(0), "").digest
    assert StreamBatch.of(rows.bfloat16(), "").digest == StreamBatch.of(rows.bfloat16().clone(), "").digest


class Counted:
    """Eight batches, each of its number."""

    origin: Any = None
    name, cure = "the counted stream", "count"

    def open_batches(self, number: int) -> Iterator[torch.Tensor]:
        return (torch.full((2,), count) for count in range(8))


def test_the_newest_batches_of_a_pass_come_again_without_reading_them_again() -> None:
    reading = OpenPass(Counted(), 0)
    reading.go_to(7)
    assert reading.is_last
    first = 7 - NEWEST + 1  # with the one before it
    assert [reading.can_go_to(done) for done in (first - 1, first)] == [False, True]
    for done in (first, 5, 7, 6):
        reading.go_to(done)
        (batch, before) = (StreamBatch.of(torch.full((2,), count), "") for count in (done, done - 1))
        assert reading.batch is not None
        assert (reading.done, reading.batch.digest, reading.before) == (done, batch.digest, before.digest)
    reading.go_to(9)
    assert (reading.batch, reading.done) == (None, 8)
