"""What several files of tests with processes need: jobs that train."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from training import SETTINGS, Training
from unisono.testing import warm_jobs


@pytest.fixture(scope="session")
def warm(nothing_outlives_the_run: None) -> Iterator[None]:
    """Jobs fork their workers from one process that has torch loaded; a test without it is one whose jobs load it.

    Serial runs do not: all forks of one process go through a set of words in the same order, and no two programs do.
    """
    with warm_jobs(varying={*SETTINGS, "PYTEST_CURRENT_TEST"}):
        yield


@pytest.fixture
def started(warm: None, tmp_path: Path) -> Iterator[list[Training]]:
    """The jobs that a test has started; whichever still runs is ended with it."""
    trainings: list[Training] = []
    yield trainings
    for training in trainings:
        training.close()


@pytest.fixture(scope="session")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """The undisturbed run of one worker."""
    training = Training(tmp_path_factory.mktemp("serial") / "run", "-n", "1", PACE_S="0")
    training.end()
    yield training
    training.close()
