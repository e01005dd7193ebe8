"""Workers, joiners and resumed runs whose data hold other samples: refused before a step; and what is no such thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from script_cluster import Cluster, Done, Kill
from unisono.errors import JobMismatch

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "other_data.py"
MAPPED = ("split", "made", "processes", "late", "evaluated")
STREAMED = ("stream", "read ahead")


def train(at: Path, data: str, workers: int | tuple[int, int], drawn: str = "", **how: Any) -> Done:
    return Cluster(at)(SCRIPT, workers, shards=6, DATA=data, DRAWN=drawn, **how)


@pytest.mark.parametrize("data", [*MAPPED, *STREAMED])
def test_workers_whose_samples_were_drawn_without_a_seed_are_refused_before_a_step(data: str, tmp_path: Path) -> None:
    with pytest.raises(JobMismatch, match="rank 1 has another data set than rank 0") as refused:
        train(tmp_path, data, 2)
    assert "samples at a few places" in str(refused.value)
    assert "need a seed" in str(refused.value) or "needs a seed" in str(refused.value)
    assert not (tmp_path / "run-0" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "data", ["made", pytest.param("processes", marks=pytest.mark.slow), *STREAMED, "evaluated", "odd"]
)
def test_data_drawn_with_a_seed_train_alike_on_any_number_of_workers(data: str, tmp_path: Path) -> None:
    alone, *others = [train(tmp_path, data, workers, "5").outcome for workers in (1, 2, 3)]
    assert others == [alone, alone]


@pytest.mark.parametrize(
    "data", ["made", pytest.param("stream", marks=pytest.mark.slow), pytest.param("evaluated", marks=pytest.mark.slow)]
)
def test_whoever_joins_with_the_same_samples_is_taken_in(data: str, tmp_path: Path) -> None:
    done = train(tmp_path, data, (2, 2), "5", kills=[Kill(5, 1), Kill(11, 0)])
    assert done.world.struck == 2
    assert done.outcome == train(tmp_path, data, 1, "5").outcome


@pytest.mark.parametrize(("data", "stop"), [("made", "2"), ("stream", "10")])
def test_a_run_that_resumes_within_an_epoch_with_other_samples_is_refused(data: str, stop: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(tmp_path, data, 1, "5", folder=folder, UNISONO_STOP_AFTER=stop, UNISONO_CHECKPOINT_EVERY="1")
    with pytest.raises(JobMismatch, match="reads other data than when its checkpoint was written.*content.*a seed"):
        train(tmp_path, data, 1, "6", folder=folder)
    again = train(tmp_path, data, 2, "5", folder=folder)
    assert again.digest == train(tmp_path, data, 1, "5").digest


def test_a_run_may_go_on_with_other_samples_where_another_job_is_allowed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(tmp_path, "made", 1, "5", folder=folder, UNISONO_STOP_AFTER="2", UNISONO_CHECKPOINT_EVERY="1")
    assert train(tmp_path, "made", 1, "6", folder=folder, UNISONO_ALLOW_JOB_CHANGE="1").journal("resumed")
