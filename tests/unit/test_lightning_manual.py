"""Modules of Lightning that optimize by themselves train as with Lightning alone, on any number of workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch  # noqa: F401  it sets variables of the environment when it is imported first
import pytest

from script_cluster import Cluster, Done, Flip, Kill

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "lightning_manual.py"
SHAPES = ["gan", "accumulated", "closed", "idle"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("lightning-manual"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Callable[[str], Done]:
    known = dict[str, Done]()

    def of(shape: str) -> Done:
        if shape not in known:
            known[shape] = cluster(SCRIPT, 1, shards=8, SHAPE=shape)
        return known[shape]

    return of


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_logged_values_are_the_same_on_any_number_of_workers(
    cluster: Cluster, serial: Callable[[str], Done], shape: str, workers: int
) -> None:
    done = cluster(SCRIPT, workers, shards=8, SHAPE=shape)
    assert done.said == serial(shape).said != []
    assert done.outcome == serial(shape).outcome


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_shows_that_workers_were_killed_and_others_came(
    cluster: Cluster, serial: Callable[[str], Done], shape: str
) -> None:
    done = cluster(SCRIPT, 3, shards=8, kills=[Kill(1, 1, 6), Kill(3, 0, 0), Kill(5, 2, 13)], SHAPE=shape)
    assert len(done.world.formed) > 3
    assert done.said == serial(shape).said
    assert done.outcome == serial(shape).outcome


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_resumes_on_another_number_of_workers(
    cluster: Cluster, serial: Callable[[str], Done], shape: str, tmp_path: Path
) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, SHAPE=shape, UNISONO_STOP_AFTER="6")
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path, SHAPE=shape)
    assert done.journal("resumed")
    assert set(serial(shape).said) <= set(done.said)
    assert done.outcome == serial(shape).outcome


@pytest.mark.parametrize("shape", ["accumulated", "gan"])
def test_a_fault_of_the_memory_sets_a_training_back(
    cluster: Cluster, serial: Callable[[str], Done], shape: str
) -> None:
    done = cluster(SCRIPT, 2, shards=8, flips=[Flip(7, "step_ends")], SHAPE=shape)
    assert not done.world.flips
    assert done.said == serial(shape).said
    assert done.outcome == serial(shape).outcome


@pytest.mark.parametrize("shape", SHAPES)
def test_with_one_shard_weights_and_logged_values_are_those_of_lightning_alone(cluster: Cluster, shape: str) -> None:
    done = cluster(SCRIPT, 1, shards=1, SHAPE=shape, STILL="yes")
    environment = {"SHAPE": shape, "STILL": "yes", "PLAIN": "yes", "PYTHONPATH": ":".join(sys.path)}
    plain = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.said == plain.stdout.splitlines()
