"""What several files of tests with processes need: jobs that train."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forks.commands import warm_jobs
from launches import Launches, launches
from leaks import ALLOWED_VARIABLES
from serial_runs import SerialRuns
from slurm_cluster import Cluster, NoCluster, slurm_cluster
from slurm_jobs import LONG
from slurm_jobs import SCRIPT as SMALL
from training import SCRIPT, SETTINGS, Trained, Training


@pytest.fixture(scope="session")
def warm(nothing_outlives_the_run: None) -> Iterator[None]:
    """Jobs fork their workers from one process that has torch loaded; a test without it is one whose jobs load it.

    Serial runs have another such process: all forks of one go through a set of words in the same order, and no two
    programs do.
    """
    with warm_jobs(varying={*SETTINGS, *ALLOWED_VARIABLES}):
        yield


@pytest.fixture
def started(warm: None, tmp_path: Path) -> Iterator[list[Training]]:
    """The jobs that a test has started; whichever still runs is ended with it."""
    trainings: list[Training] = []
    yield trainings
    for training in trainings:
        training.close()


@pytest.fixture(scope="session")
def serial_launches(nothing_outlives_the_run: None) -> Iterator[Launches]:
    """What forks serial runs. It has torch loaded: a test that has none of its own to make does not ask for it."""
    with launches({**os.environ, "PYTHONHASHSEED": "1"}) as found:
        yield found


@pytest.fixture(scope="session")
def serial_runs(serial_launches: Launches, tmp_path_factory: pytest.TempPathFactory) -> SerialRuns:
    """The undisturbed runs of one worker, of any script. What forks them is there before the test begins."""
    own = tmp_path_factory.getbasetemp()
    kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "serial-runs"
    return SerialRuns(kept, lambda: serial_launches)


@pytest.fixture(scope="session")
def serial(serial_runs: SerialRuns) -> Trained:
    """That of the script that has nearly everything."""
    return serial_runs(SCRIPT, PACE_S="0")


@pytest.fixture(scope="session")
def small_serial(serial_runs: SerialRuns) -> str:
    """The digest of the script that jobs of Slurm and Ray train."""
    return serial_runs(SMALL).end()


@pytest.fixture(scope="session")
def long_serial(serial_runs: SerialRuns) -> Trained:
    """The same script for longer."""
    return serial_runs(SMALL, **LONG)


@pytest.fixture(scope="session")
def shared_cluster(nothing_outlives_the_run: None) -> Iterator[Cluster]:
    """A Slurm of three nodes."""
    with _slurm() as found:
        yield found


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The same with free nodes, before the test and after it."""
    yield shared_cluster
    shared_cluster.clear()


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """One more, whose nodes a test may kill."""
    with _slurm() as found:
        yield found


@contextmanager
def _slurm() -> Iterator[Cluster]:
    try:
        with slurm_cluster() as found:
            yield found
    except NoCluster as reason:
        pytest.skip(f"NO SLURM: {reason}")
