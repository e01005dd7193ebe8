"""An accelerate script on several workers: the same weights and the same lines, whatever happens to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import operations

from script_cluster import Cluster, Done, Flip, Kill

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "accelerate_training.py"
TURNS = SCRIPT.with_name("accelerate_turns.py")
CALLS = TURNS.with_name("accelerate_calls.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Done:
    return cluster(SCRIPT, 1, shards=8)


def test_weights_and_lines_are_the_same_on_three_workers(cluster: Cluster, serial: Done) -> None:
    done = cluster(SCRIPT, 3, shards=8)
    assert len(serial.said) == 6
    assert done.said == serial.said
    assert done.outcome == serial.outcome


def test_nothing_shows_that_workers_were_killed_and_others_came(cluster: Cluster, serial: Done) -> None:
    kills = [Kill(2, 1, 6), Kill(5, 0, 0), Kill(8, 2, 13), Kill(11, 0, 6), Kill(15, 1, 6)]
    done = cluster(SCRIPT, 3, shards=8, kills=kills)
    assert len(done.world.formed) > 5
    assert done.said == serial.said
    assert done.outcome == serial.outcome


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("step", "moment"), [(3, "step_begins"), pytest.param(7, "step_ends", marks=pytest.mark.slow), (19, "step_ends")]
)
def test_a_fault_of_the_memory_sets_back_all_that_a_training_counts(
    cluster: Cluster, serial: Done, workers: int, step: int, moment: Any
) -> None:
    done = cluster(SCRIPT, workers, shards=8, flips=[Flip(step, moment)])
    assert not done.world.flips
    assert done.said == serial.said
    assert done.outcome == serial.outcome


def test_a_run_resumes_on_another_number_of_workers(cluster: Cluster, serial: Done, tmp_path: Path) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER="12")
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path)
    assert done.journal("resumed")
    told = [line for line in done.said if not line.startswith("after step")]
    assert {serial.said[0], serial.said[-1]} <= set(told) <= set(serial.said)
    assert done.outcome == serial.outcome


@pytest.fixture(scope="module")
def serial_turns(cluster: Cluster) -> Done:
    return cluster(TURNS, 1, shards=4)


@pytest.mark.parametrize("workers", [2, 3])
def test_what_a_turn_finds_is_the_same_whatever_turns_a_worker_has(
    cluster: Cluster, serial_turns: Done, workers: int
) -> None:
    done = cluster(TURNS, workers, shards=4)
    assert len(serial_turns.said) == 3
    assert done.said == serial_turns.said
    assert done.outcome == serial_turns.outcome
    assert (done.folder / "main-worker-was-killed").exists() == (workers == 3)


def test_a_run_resumes_with_models_of_two_calls_and_saves_states_again(
    cluster: Cluster, serial_turns: Done, tmp_path: Path
) -> None:
    cluster(TURNS, 2, shards=4, folder=tmp_path, UNISONO_STOP_AFTER="7")
    done = cluster(TURNS, 3, shards=4, folder=tmp_path)
    assert done.outcome == serial_turns.outcome
    assert done.said[-1] == serial_turns.said[-1]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_functions_that_processes_call_together_and_uneven_streams_are_as_on_one_worker(
    cluster: Cluster, workers: int
) -> None:
    code = operations.gather_object.__code__
    serial, done = (cluster(CALLS, count, shards=6) for count in (1, workers))
    assert done.said == serial.said
    (line,) = serial.said
    assert line.startswith("after [0, 'worker 0'] [0, 7] ")
    assert line.count("'label ") == 17
    assert done.digest == serial.digest
    assert operations.gather_object.__code__ is code


def test_they_are_refused_in_the_body_of_a_training_loop(cluster: Cluster) -> None:
    done = cluster(CALLS, 2, shards=6, REFUSED="yes")
    assert "refused gather or reduce in the body of a training loop, which runs once for each shard" in done.printed


def test_the_body_of_a_loop_runs_once_for_each_shard_whatever_a_model_keeps(cluster: Cluster) -> None:
    done = cluster(CALLS.with_name("accelerate_shown.py"), 1, shards=4)
    assert done.said == [f"after {6 * 4} turns"]


@pytest.mark.parametrize("workers", [2, 3])
def test_models_in_training_mode_that_evaluate_have_all_batches_on_every_worker(cluster: Cluster, workers: int) -> None:
    modes = CALLS.with_name("accelerate_modes.py")
    serial, done = (cluster(modes, count, shards=6) for count in (1, workers))
    (line,) = serial.said
    assert line.startswith("after [4, 8] ")
    assert done.said == serial.said
    assert done.outcome == serial.outcome
