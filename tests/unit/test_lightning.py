"""A LightningModule on several workers: the same weights, logs and decisions, whatever happens to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning  # noqa: F401 (it sets a variable of the environment, which is no test's)
import pytest

from script_cluster import Cluster, Done, Flip, Kill

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "lightning_training.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Done:
    return cluster(SCRIPT, 1, shards=8)


def same(done: Done, serial: Done) -> None:
    assert done.said == serial.said
    assert done.outcome == serial.outcome
    assert files(done) == files(serial)
    assert rows(done) == rows(serial)


def files(done: Done) -> list[str]:
    """What ModelCheckpoint has written."""
    return sorted(one.name for one in (done.folder / "best").iterdir())


def rows(done: Done) -> list[str]:
    """What CSVLogger has written."""
    return (done.folder / "rows" / "version_0" / "metrics.csv").read_text().splitlines()


def test_nothing_shows_that_workers_were_killed_and_others_came(cluster: Cluster, serial: Done) -> None:
    kills = [Kill(step, rank, 5) for step, rank in ((3, 1), (7, 0), (11, 2), (15, 0), (18, 1), (26, 0))]
    done = cluster(SCRIPT, 3, shards=8, kills=kills)
    assert len(done.world.formed) > 5
    assert len(serial.said) == 8
    same(done, serial)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "points"), [(0, 60), (1, 63), (0, 66), (1, 68)])
def test_a_worker_may_be_lost_while_a_trainings_last_step_is_compared(
    cluster: Cluster, serial: Done, rank: int, points: int
) -> None:
    done = cluster(SCRIPT, 3, shards=8, kills=[Kill(23, rank, points)])  # behind the step, and what it writes
    assert done.world.struck == 1
    assert done.said == serial.said
    assert (done.outcome, files(done)) == (serial.outcome, files(serial))
    assert not rank or rows(done) == rows(serial)  # those of a main worker that is lost there are lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "flip"),
    [
        (1, Flip(23, "step_ends")),  # the last step of the first fit, whose checkpoint is written again
        pytest.param(2, Flip(12, "step_computed"), marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_the_memory_sets_back_all_that_a_training_counts(
    cluster: Cluster, serial: Done, workers: int, flip: Flip
) -> None:
    done = cluster(SCRIPT, workers, shards=8, flips=[flip])
    assert not done.world.flips
    assert set(serial.said) <= set(done.said)  # an epoch that was computed wrongly has said so, too
    assert (done.outcome, files(done)) == (serial.outcome, files(serial))


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_workers(cluster: Cluster, serial: Done, tmp_path: Path) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER="16")
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path)
    assert done.journal("resumed")
    told = [line for line in done.said if not line.startswith("after step")]
    assert told[0] == serial.said[0]
    assert set(told) < set(serial.said)
    assert done.outcome == serial.outcome
    assert files(done) == files(serial)
    assert rows(done) == rows(serial)


@pytest.mark.parametrize(
    "kind", ["stream", "none", "looking", "pruned", "permanent", "teacher", "failing", "clock", "short"]
)
def test_any_number_of_workers_trains_alike(cluster: Cluster, kind: str, tmp_path: Path) -> None:
    def ended(workers: int, **how: Any) -> tuple[list[str], Any]:
        folder = tmp_path / f"{workers} {len(how)}"
        done = cluster(SCRIPT.with_name("lightning_streams.py"), workers, shards=6, KIND=kind, folder=folder, **how)
        return done.said, done.outcome

    serial = ended(1)
    assert len(serial[0]) == (2 if kind in ("failing", "clock") else 1)
    assert ended(2) == ended(3) == ended(3, kills=[Kill(4, 1, 5)]) == serial


def test_masks_that_go_with_a_fit_are_gone_wherever_a_run_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    def ended(workers: int, name: str, **how: Any) -> str:
        script = SCRIPT.with_name("lightning_streams.py")
        done = cluster(script, workers, shards=6, KIND="permanent", folder=tmp_path / name, **how)
        assert ("masks ['" in done.printed) == ("UNISONO_STOP_AFTER" in how and name == "6")  # in the first fit
        return done.digest

    serial = ended(1, "serial")
    for step, rank, points in ((11, 1, 40), (11, 0, 60), (12, 1, 2)):
        assert ended(3, f"{step} {rank}", kills=[Kill(step, rank, points)]) == serial
    for stop in ("6", "12", "14"):
        ended(2, stop, UNISONO_STOP_AFTER=stop)
        assert ended(3, stop) == serial
    assert ended(2, "serial") == serial


def test_a_run_goes_on_in_the_part_of_an_epoch_that_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    script = SCRIPT.with_name("lightning_streams.py")
    serial = cluster(script, 1, shards=6, KIND="short")
    for stop in (3, 4):
        cluster(script, 2, shards=6, KIND="short", folder=tmp_path / str(stop), UNISONO_STOP_AFTER=str(stop))
        assert cluster(script, 3, shards=6, KIND="short", folder=tmp_path / str(stop)).digest == serial.digest
