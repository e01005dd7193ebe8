"""A Keras model on several workers: the same weights and the same history, whatever happens to them."""

from __future__ import annotations

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


def test_nothing_shows_that_workers_were_killed_and_others_came(cluster: Cluster, serial: Done) -> None:
    kills = [Kill(3, 1, 5), Kill(7, 0, 5), Kill(11, 2, 5), Kill(15, 0, 5), Kill(21, 1, 5)]
    done = cluster(SCRIPT, 3, shards=8, kills=kills, arguments=["unlogged"])
    assert len(done.world.formed) > 5
    assert len(said(serial)) == 4
    same(done, serial)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "flip"),
    [
        (1, Flip(23, "step_ends")),  # the last step, which steps_per_epoch ends
        slow(1, Flip(15, "step_ends")),  # behind an evaluation, and before the next training
        slow(1, Flip(16, "step_computed")),  # of weights that the end of a training has written
        slow(2, Flip(3, "step_begins")),
    ],
)
def test_a_fault_of_the_memory_sets_back_all_that_a_training_counts(
    cluster: Cluster, serial: Done, workers: int, flip: Flip
) -> None:
    done = cluster(SCRIPT, workers, shards=8, flips=[flip])
    assert not done.world.flips
    same(done, serial)


def test_a_run_resumes_on_another_number_of_workers(cluster: Cluster, serial: Done, tmp_path: Path) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER="16")
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path)
    assert done.journal("resumed")
    assert rows(done) == rows(serial)
    same(done, serial)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "stop"), [("keras_models.py", 8), slow("keras_batches.py", 20), ("keras_one_line.py", None)]
)
def test_models_by_turns_changing_data_and_a_run_of_one_line_are_the_same_whatever_happens(
    cluster: Cluster, script: str, stop: int | None, tmp_path: Path
) -> None:
    """Of several models, what each wrote is there; data that change do so on workers that come later."""
    one = cluster(SCRIPTS / script, 1, shards=8)
    kills = [Kill(2, 1, 0), Kill(5, 0, 5), Kill(11, 2, 5), Kill(14, 0, 0)]
    found = [cluster(SCRIPTS / script, 3, shards=8, kills=kills)]
    if stop is not None:
        cluster(SCRIPTS / script, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER=str(stop))
        found.append(cluster(SCRIPTS / script, 2, shards=8, folder=tmp_path))
    for done in found:
        assert (done.outcome, said(done)) == (one.outcome, said(one))


def test_batches_of_generators_and_what_is_said_of_evaluated_ones_are_the_same_whatever_happens(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = SCRIPTS / "keras_on_batches.py"
    one = cluster(script, 1, shards=8)
    kills = [Kill(1, 1, 0), Kill(4, 0, 5), *(Kill(step, 0, 0) for step in (14, 15, 16))]
    found = [cluster(script, 3, shards=8, kills=kills)]  # who is the main worker in the end has joined late
    assert len(found[0].world.formed) > 5
    for stop, workers in ((12, 2), (15, 5)):  # behind a training with a generator, and in the next one
        folder = tmp_path / str(stop)
        cluster(script, 2, shards=8, folder=folder, UNISONO_STOP_AFTER=str(stop))
        found.append(cluster(script, workers, shards=8, folder=folder))
    for done in found:
        assert (done.outcome, said(done)) == (one.outcome, said(one))


@pytest.mark.parametrize("stop", [slow(5), slow(11)])
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
