"""State that nobody named is compared: between workers, with a checkpoint, and on a worker that joins."""

from pathlib import Path
from typing import Any

import pytest

from script_cluster import Cluster, Done, Kill

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning")]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "unnamed.py"


def slow(workers: int) -> Any:
    """A number of workers that is left to the night."""
    return pytest.param(workers, marks=pytest.mark.slow)


@pytest.fixture
def train(tmp_path: Path) -> Any:
    def trained(workers: int | tuple[int, int], kind: str, **how: Any) -> Done:
        return Cluster(tmp_path)(SCRIPT, workers, shards=6, KIND=kind, **{"folder": tmp_path / "run", **how})

    return trained


def told(done: Done) -> set[str]:
    return {line["path"] for line in done.journal("unnamed state")}


@pytest.mark.parametrize("workers", [slow(2), 3, slow(5)])
def test_what_differs_between_workers_as_a_loop_begins_is_told_but_for_ranks(train: Any, workers: int) -> None:
    (line,) = train(workers, "other").journal("unnamed state")
    assert line["path"] == "model.shift"
    assert "is 0.0 on rank 0 and 0.1 on rank 1" in line["why"]


@pytest.mark.parametrize("workers", [1, slow(2), slow(3)])
@pytest.mark.parametrize(("kind", "path"), [("epoch", "dataset.epoch"), ("weight", "weight")])
def test_what_the_body_has_changed_is_told_where_a_run_resumes(train: Any, kind: str, path: str, workers: int) -> None:
    first = train(1, kind, UNISONO_STOP_AFTER="10", UNISONO_CHECKPOINT_EVERY="3")
    assert told(first) == set()
    assert told(train(workers, kind)) - {"model.shift"} == {path}


@pytest.mark.parametrize("workers", [2, slow(3)])
@pytest.mark.parametrize(("kind", "path"), [("epoch", "dataset.epoch"), ("weight", "weight")])
def test_it_is_told_where_a_worker_joins(train: Any, kind: str, path: str, workers: int) -> None:
    done = train((workers, workers), kind, kills=[Kill(9, 1)])
    assert told(done) - {"model.shift"} == {path}


def test_what_the_body_sets_before_its_first_call_is_no_matter(train: Any) -> None:
    train(1, "set", UNISONO_STOP_AFTER="10", UNISONO_CHECKPOINT_EVERY="3")
    assert told(train(1, "set")) == set()
    assert told(train((2, 2), "set", kills=[Kill(9, 1)], folder=None)) <= {"model.shift"}


def test_nothing_is_told_of_workers_that_are_alike(train: Any) -> None:
    assert told(train(3, "alike")) == set()
