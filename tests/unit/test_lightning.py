"""A LightningModule on several workers: the same weights, logs and decisions, whatever happens to them."""

from __future__ import annotations

from pathlib import Path

import lightning  # noqa: F401 (it sets a variable of the environment, which is no test's)
import pytest

from script_cluster import Cluster, Done, Kill

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


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
def test_weights_and_logs_are_the_same_on_any_number_of_workers(cluster: Cluster, serial: Done, workers: int) -> None:
    done = cluster(SCRIPT, workers, shards=8)
    assert len(serial.said) == 8
    same(done, serial)


@pytest.mark.parametrize("points", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_nothing_shows_that_workers_were_killed_and_others_came(cluster: Cluster, serial: Done, points: int) -> None:
    kills = [
        Kill(3, 1, points),
        Kill(7, 0, points),
        Kill(11, 2, points),
        Kill(15, 0, points),
        Kill(18, 1, points),
        Kill(26, 0, points),
    ]
    done = cluster(SCRIPT, 3, shards=8, kills=kills)
    assert len(done.world.formed) > 5
    same(done, serial)


@pytest.mark.parametrize("stop", [pytest.param(6, marks=pytest.mark.slow), 16])
def test_a_run_resumes_on_another_number_of_workers(cluster: Cluster, serial: Done, stop: int, tmp_path: Path) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER=str(stop))
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path)
    assert done.journal("resumed")
    told = [line for line in done.said if not line.startswith("after step")]
    assert told[0] == serial.said[0]
    assert set(told) < set(serial.said)
    assert done.outcome == serial.outcome
    assert files(done) == files(serial)
    assert rows(done) == rows(serial)
