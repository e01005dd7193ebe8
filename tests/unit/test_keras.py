"""A Keras model on several workers: the same weights and the same history, whatever happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras  # noqa: F401 (it sets a variable of the environment, which is no test's)
import pytest

from script_cluster import Cluster, Done, Flip, Kill

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras makes arrays of tensors in NumPy's old way
]

SCRIPTS = Path(__file__).parents[1] / "procs" / "scripts"
SCRIPT = SCRIPTS / "keras_training.py"

EVERYWHERE: list[tuple[int, Any]] = [(3, "step_begins"), (7, "step_ends"), (8, "step_computed"), (24, "step_ends")]
"""Steps and moments: an epoch's end, before and behind its evaluation, the begin of one, and the last step."""


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("keras"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Done:
    return cluster(SCRIPT, 1, shards=8)


def said(done: Done) -> list[str]:
    return [line for line in done.said if not line.startswith("after step")]


def same(done: Done, serial: Done) -> None:
    assert said(done) == said(serial)
    assert done.outcome == serial.outcome
    assert (done.folder / "best.weights.h5").is_file()


def rows(done: Done) -> list[str]:
    """What a callback has written."""
    return (done.folder / "epochs.csv").read_text().splitlines()


@pytest.mark.parametrize("workers", [slow(2), 3, slow(5)])
def test_weights_and_history_are_the_same_on_any_number_of_workers(
    cluster: Cluster, serial: Done, workers: int
) -> None:
    done = cluster(SCRIPT, workers, shards=8)
    assert len(said(serial)) == 4
    assert said(done) == said(serial)
    assert rows(done) == rows(serial)
    same(done, serial)


@pytest.mark.parametrize("points", [slow(0), 5])
def test_nothing_shows_that_workers_were_killed_and_others_came(cluster: Cluster, serial: Done, points: int) -> None:
    kills = [Kill(3, 1, points), Kill(7, 0, points), Kill(11, 2, points), Kill(15, 0, points), Kill(21, 1, points)]
    done = cluster(SCRIPT, 3, shards=8, kills=kills, arguments=["unlogged"])
    assert len(done.world.formed) > 5
    assert said(done) == said(serial)
    same(done, serial)


@pytest.mark.parametrize(
    ("workers", "flip"),
    [
        (1, Flip(24, "step_ends")),  # the last step, which steps_per_epoch ends
        slow(1, Flip(15, "step_ends")),  # behind an evaluation, and before the next training
        slow(1, Flip(16, "step_computed")),  # of weights that the end of a training has written
        *(slow(workers, Flip(step, moment)) for workers in (1, 2) for step, moment in EVERYWHERE),
    ],
)
def test_a_fault_of_the_memory_sets_back_all_that_a_training_counts(
    cluster: Cluster, serial: Done, workers: int, flip: Flip
) -> None:
    done = cluster(SCRIPT, workers, shards=8, flips=[flip])
    assert not done.world.flips
    same(done, serial)


@pytest.mark.parametrize("stop", [slow(6), 16, slow(19)])
def test_a_run_resumes_on_another_number_of_workers(cluster: Cluster, serial: Done, stop: int, tmp_path: Path) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER=str(stop))
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path)
    assert done.journal("resumed")
    assert rows(done) == rows(serial)
    same(done, serial)


@pytest.mark.parametrize(
    ("workers", "kills"),
    [slow(2, ()), slow(3, ()), slow(5, ()), (3, (Kill(2, 1, 0), Kill(5, 0, 5), Kill(11, 2, 5), Kill(14, 0, 0)))],
)
def test_a_run_that_begins_and_ends_by_itself_is_the_same_on_any_number_of_workers(
    workers: int, kills: Sequence[Kill], cluster: Cluster
) -> None:
    one = cluster(SCRIPTS / "keras_one_line.py", 1, shards=8)
    done = cluster(SCRIPTS / "keras_one_line.py", workers, shards=8, kills=kills)
    assert (done.outcome, said(done)) == (one.outcome, said(one))
    assert one.metrics[18]["batch_size"] == 20


MODELS = SCRIPTS / "keras_models.py"


@pytest.fixture(scope="module")
def of_models(cluster: Cluster) -> Done:
    return cluster(MODELS, 1, shards=8)


@pytest.mark.parametrize("workers", [slow(2), 3, slow(5)])
def test_models_that_train_by_turns_give_the_same_on_any_number_of_workers(
    cluster: Cluster, of_models: Done, workers: int
) -> None:
    done = cluster(MODELS, workers, shards=8)
    assert len(said(done)) == 2
    assert (done.outcome, said(done)) == (of_models.outcome, said(of_models))


@pytest.mark.parametrize("points", [slow(0), slow(5)])
def test_models_that_train_by_turns_are_all_given_to_workers_that_come_later(
    cluster: Cluster, of_models: Done, points: int
) -> None:
    kills = [Kill(2, 1, points), Kill(7, 0, points), Kill(9, 2, points), Kill(12, 0, points), Kill(17, 1, points)]
    done = cluster(MODELS, 3, shards=8, kills=kills)
    assert (done.outcome, said(done)) == (of_models.outcome, said(of_models))


@pytest.mark.parametrize("stop", [slow(6), 8, slow(12), slow(16)])
def test_models_that_train_by_turns_and_what_they_wrote_are_there_when_a_run_resumes(
    cluster: Cluster, of_models: Done, stop: int, tmp_path: Path
) -> None:
    cluster(MODELS, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER=str(stop))
    done = cluster(MODELS, 2, shards=8, folder=tmp_path)
    assert (done.outcome, said(done)) == (of_models.outcome, said(of_models))


BATCHES = SCRIPTS / "keras_batches.py"


@pytest.fixture(scope="module")
def from_batches(cluster: Cluster) -> Done:
    return cluster(BATCHES, 1, shards=8)


@pytest.mark.parametrize("workers", [slow(2), slow(3), slow(5)])
def test_a_data_set_of_batches_gives_the_same_on_any_number_of_workers(
    cluster: Cluster, from_batches: Done, workers: int
) -> None:
    done = cluster(BATCHES, workers, shards=8)
    assert (done.outcome, said(done)) == (from_batches.outcome, said(from_batches))


@pytest.mark.parametrize("points", [slow(0), slow(5)])
def test_a_data_set_that_changes_does_so_on_workers_that_come_later(
    cluster: Cluster, from_batches: Done, points: int
) -> None:
    kills = [Kill(4, 1, points), Kill(5, 0, points), Kill(9, 2, points), Kill(19, 0, points), Kill(23, 1, points)]
    done = cluster(BATCHES, 3, shards=8, kills=kills)
    assert (done.outcome, said(done)) == (from_batches.outcome, said(from_batches))


@pytest.mark.parametrize("stop", [slow(7), slow(20)])
def test_a_data_set_that_changes_goes_on_where_it_was(
    cluster: Cluster, from_batches: Done, stop: int, tmp_path: Path
) -> None:
    cluster(BATCHES, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER=str(stop))
    done = cluster(BATCHES, 2, shards=8, folder=tmp_path)
    assert (done.outcome, said(done)) == (from_batches.outcome, said(from_batches))


@pytest.mark.parametrize("stop", [slow(5), slow(10), slow(11), slow(14)])
def test_what_was_predicted_between_trainings_is_there_when_a_run_resumes(
    cluster: Cluster, stop: int, tmp_path: Path
) -> None:
    script = SCRIPTS / "keras_rounds.py"
    one = cluster(script, 1, shards=8)
    cluster(script, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER=str(stop))
    done = cluster(script, 2, shards=8, folder=tmp_path)
    assert (done.folder / "exported").read_text() in ("x", "xx")  # a job that is cut short comes to its last line, too
    assert (done.outcome, rounds(done)) == (one.outcome, rounds(one))
    killed = cluster(script, 3, shards=8, kills=[Kill(stop, 0, 0), Kill(stop + 2, 1, 5)])
    assert (killed.folder / "exported").read_text() == "x"
    assert (killed.outcome, rounds(killed)) == (one.outcome, rounds(one))


def rounds(done: Done) -> list[str]:
    (line,) = (line for line in done.said if line.startswith("after all"))
    return [line]
