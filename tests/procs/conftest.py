"""What several files of tests with processes need: jobs that train."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leaks import ALLOWED_VARIABLES
from training import EARLY, SETTINGS, Trained, Training
from unisono.testing import warm_jobs


@pytest.fixture(scope="session")
def warm(nothing_outlives_the_run: None) -> Iterator[None]:
    """Jobs fork their workers from one process that has torch loaded; a test without it is one whose jobs load it.

    Serial runs do not: all forks of one process go through a set of words in the same order, and no two programs do.
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
def serial(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The undisturbed run of one worker."""
    return once(tmp_path_factory, "undisturbed")


@pytest.fixture(scope="session")
def stopped_early(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same of a script that leaves its first loop before that is over."""
    return once(tmp_path_factory, "stopped-early", **EARLY)


def once(factory: pytest.TempPathFactory, name: str, **settings: Any) -> Trained:
    """A run of one worker: one for all processes that run tests."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            training = Training(folder / f"run-{secrets.token_hex(4)}", "-n", "1", PACE_S="0", **settings)
            try:
                training.end()
            finally:
                training.close()
            (folder / "done").write_text(training.run_dir.name)
    return Trained(folder / (folder / "done").read_text())
