"""Where there is no Keras that can be used. In processes: ``test_guests.py``."""

import pytest

from commands import python

pytestmark = pytest.mark.procs


def test_keras_is_not_loaded_by_itself_and_another_backend_is_refused() -> None:
    done = python("-c", "import sys, unisono; assert 'keras' not in sys.modules; unisono.keras", KERAS_BACKEND="numpy")
    assert "JobError: unisono.keras needs Keras on torch" in done.stderr
    assert "set the environment variable KERAS_BACKEND=torch" in done.stderr
