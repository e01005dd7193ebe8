"""A Transformers Trainer on several workers: the same weights and the same history, whatever happens to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from script_cluster import Cluster, Done, Flip, Kill

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "transformers_training.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("transformers"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Done:
    return cluster(SCRIPT, 1, shards=6)


def said(done: Done) -> list[str]:
    return [line for line in done.said if not line.startswith("after step")]


def files(done: Done) -> list[str]:
    """What the trainer has left."""
    return sorted(str(one.relative_to(done.folder)) for one in (done.folder / "trainer").rglob("*"))


def same(done: Done, serial: Done) -> None:
    assert len(said(serial)) == 3
    assert said(done) == said(serial)
    assert done.outcome == serial.outcome
    assert files(done) == files(serial)


def test_weights_and_history_are_the_same_on_three_workers(cluster: Cluster, serial: Done) -> None:
    same(cluster(SCRIPT, 3, shards=6), serial)


def test_nothing_shows_that_workers_were_killed_and_others_came(cluster: Cluster, serial: Done) -> None:
    done = cluster(SCRIPT, 3, shards=6, kills=[Kill(*each, 5) for each in ((2, 1), (4, 0), (7, 2), (9, 0), (11, 1))])
    assert len(done.world.formed) > 5
    same(done, serial)


@pytest.mark.slow
@pytest.mark.parametrize("flip", [Flip(3, "step_begins"), Flip(9, "step_ends", rank=1), Flip(12, "step_ends")])
def test_a_fault_of_the_memory_sets_back_all_that_a_trainer_counts(cluster: Cluster, serial: Done, flip: Flip) -> None:
    done = cluster(SCRIPT, 2, shards=6, flips=[flip])
    assert not done.world.flips
    same(done, serial)


def test_a_run_resumes_on_another_number_of_workers(cluster: Cluster, serial: Done, tmp_path: Path) -> None:
    cluster(SCRIPT, 3, shards=6, folder=tmp_path, UNISONO_STOP_AFTER="7")
    done = cluster(SCRIPT, 2, shards=6, folder=tmp_path)
    assert done.journal("resumed")
    same(done, serial)


def test_a_trainer_goes_on_from_its_own_checkpoint_on_another_number_of_workers(
    cluster: Cluster, serial: Done, tmp_path: Path
) -> None:
    stopped = cluster(SCRIPT, 3, shards=6, UNISONO_STOP_AFTER="8")
    checkpoint = str(stopped.folder / "trainer" / "checkpoint-8")
    done = cluster(SCRIPT, 2, shards=6, folder=tmp_path, arguments=[checkpoint])
    assert done.digest == serial.digest
    assert done.metrics == {step: line for step, line in serial.metrics.items() if step >= 8}


@pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning")
def test_what_a_trainer_keeps_of_predicted_batches_is_that_of_all_on_each_worker(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = SCRIPT.with_name("transformers_keeps.py")
    serial, two, three = (cluster(script, count, shards=6, OUTPUT=str(tmp_path)) for count in (1, 2, 3))
    assert serial.said[0].startswith(f"after {3 * 13} ")
    assert serial.said == two.said == three.said


def test_a_stream_is_trained_on_and_evaluated(cluster: Cluster, tmp_path: Path) -> None:
    script = SCRIPT.with_name("transformers_stream.py")
    serial, three = (cluster(script, count, shards=6) for count in (1, 3))
    assert said(serial)[0].startswith("after training:")
    cluster(script, 3, shards=6, folder=tmp_path, UNISONO_STOP_AFTER="5")
    resumed = cluster(script, 2, shards=6, folder=tmp_path)
    killed = cluster(script, 3, shards=6, kills=[Kill(3, 1, 5), Kill(6, 0, 5)])
    for done in (three, resumed, killed):
        assert (said(done), done.digest) == (said(serial), serial.digest)
