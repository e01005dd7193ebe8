"""Training on a ``DataLoader``: the same bits on any number of workers and whatever happens to them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from benchmarks import thread_crew
from benchmarks.thread_crew import Trade
from script_cluster import Cluster, Done, Kill
from struck_run import loss, momentum, network
from unisono.errors import DataError, JobMismatch
from unisono.job import Job
from unisono.train.run import Run
from unisono_lab.faults.samples import Samples, problems

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "loaders.py"
SHARDS = 6
"""Of the job."""

SAMPLERS = ("random", "weighted", "subset", "halves", "buckets")


def train(cluster: Cluster, sampler: str, workers: int | tuple[int, int], **how: Any) -> Done:
    return cluster(SCRIPT, workers, shards=SHARDS, SAMPLER=sampler, UNISONO_SAMPLES="1", **how)


def found(done: Done) -> tuple[Any, ...]:
    return done.outcome, done.said


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    return {one: train(Cluster(tmp_path_factory.mktemp(one)), one, 1) for one in SAMPLERS}


def sizes(done: Done) -> list[int]:
    return [line["batch_size"] for line in done.metrics.values()]


def test_alone_batches_are_those_of_the_loader(serial: dict[str, Done]) -> None:
    assert sizes(serial["random"]) == 6 * [48, 48, 48, 48, 38]
    assert sizes(serial["weighted"]) == 6 * [48, 48, 48, 48, 8]
    assert sizes(serial["subset"]) == 6 * [48, 48, 19]
    assert sizes(serial["halves"]) == [48, 48, 9, 48, 48, 14, 48, 48, 19, 48, 48, 19, 48, 48, 19, 48, 48, 19]
    uneven = sizes(serial["buckets"])
    assert len(set(uneven)) > 5
    assert sum(uneven) == 6 * 230
    for sampler, done in serial.items():
        assert problems(Samples.read(done.folder), len(done.metrics), SHARDS) == [], sampler


@pytest.mark.parametrize(
    "sampler", ["buckets", *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLERS if name != "buckets")]
)
def test_weights_and_metrics_are_the_same_while_workers_come_and_die(
    sampler: str, serial: dict[str, Done], tmp_path: Path
) -> None:
    kills = [Kill(2, 0), Kill(7, 1, 3), Kill(11, 0, 5), Kill(14, 2, 2)]
    done = train(Cluster(tmp_path), sampler, (3, 3), kills=kills)
    assert found(done) == found(serial[sampler])
    assert done.world.struck == len(kills)
    assert problems(Samples.read(done.folder), len(done.metrics), SHARDS, Samples.read(serial[sampler].folder)) == []


@pytest.mark.parametrize(
    "sampler", ["buckets", *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLERS if name != "buckets")]
)
def test_a_run_on_three_workers_goes_on_with_two(sampler: str, serial: dict[str, Done], tmp_path: Path) -> None:
    cluster, folder = Cluster(tmp_path), tmp_path / "run"
    train(cluster, sampler, 3, folder=folder, UNISONO_CHECKPOINT_EVERY="1", UNISONO_STOP_AFTER="13")
    again = train(cluster, sampler, 2, folder=folder)
    assert again.outcome == serial[sampler].outcome
    assert {line for line in again.said if line.startswith("epoch")} <= set(serial[sampler].said)
    assert [line["step"] for line in again.journal("resumed")] == [13]


@pytest.mark.slow
def test_loader_processes_decide_no_bit(serial: dict[str, Done], tmp_path: Path) -> None:
    assert found(train(Cluster(tmp_path), "buckets", 2, LOADERS="2")) == found(serial["buckets"])


def test_a_run_that_resumes_with_another_sampler_is_refused(tmp_path: Path) -> None:
    cluster, folder = Cluster(tmp_path), tmp_path / "run"
    train(cluster, "subset", 2, folder=folder, UNISONO_CHECKPOINT_EVERY="1", UNISONO_STOP_AFTER="4")
    with pytest.raises(JobMismatch, match="order: "):
        train(cluster, "halves", 2, folder=folder)


class UnseededLater(Sampler[int]):
    """Gives each worker an order of its own from the second epoch on."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(range(24) if self.passes == 1 else np.random.default_rng().permutation(24).tolist())

    def __len__(self) -> int:
        return 24


@pytest.mark.filterwarnings("ignore:BatchNorm with")
def test_a_sampler_that_is_seeded_in_its_first_epoch_alone_is_refused_in_the_second(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        model = network()
        run.prepare(model, momentum(model.parameters()))
        data = TensorDataset(torch.linspace(-2, 2, 96).view(24, 4))
        for step in run.steps(DataLoader(data, batch_size=6, sampler=UnseededLater()), epochs=2):
            step.run(loss)

    with pytest.raises(DataError, match=r"step 4, epoch 1: rank 1 has other samples than rank 0"):
        thread_crew.train(Trade(Job.create(batch_size=6, shards=3), 3, tmp_path), script)
