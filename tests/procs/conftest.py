"""What several files of tests with processes need: jobs that train."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from training import Training


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Training]]:
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
