"""Keras' TensorBoard callback, where tensorflow is installed: ``make with-tensorflow`` has it in a venv of its own."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import keras  # noqa: F401 (it sets a variable of the environment, which is no test's)
import pytest

from script_cluster import Cluster, Done, Kill

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed: make with-tensorflow")
pytest.importorskip("tensorboard", reason="tensorboard is not installed: make with-tensorflow")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras makes arrays of tensors in NumPy's old way
]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "keras_tensorboard.py"


def points(done: Done) -> list[tuple[str, str, int, Any]]:
    """Folder, tag, step and value of each number that was written, in all files."""
    found = []
    for path in sorted((done.folder / "board").rglob("events.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = tf.compat.v1.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                number: Any = tf.make_ndarray(value.tensor)
                shown = float(number) if number.shape == () and number.dtype.kind == "f" else None
                found.append((path.parent.name, value.tag, event.step, shown))
    return sorted(found, key=str)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Done:
    return cluster(SCRIPT, 1, shards=8)


def test_points_are_those_of_one_worker_and_written_once(cluster: Cluster, serial: Done) -> None:
    expected = points(serial)
    tags = {tag for _, tag, *_ in expected}
    assert {"epoch_loss", "epoch_accuracy", "epoch_learning_rate", "batch_loss", "keras"} <= tags
    assert [step for folder, tag, step, _ in expected if (folder, tag) == ("train", "epoch_loss")] == [0, 1, 2, 3]
    assert sorted(step for _, tag, step, _ in expected if tag == "batch_loss") == [2, 4, 6, 8, 10, 12, 14, 16]
    assert points(cluster(SCRIPT, 3, shards=8)) == expected


def test_a_worker_that_becomes_the_main_one_goes_on_with_the_same_steps(cluster: Cluster, serial: Done) -> None:
    done = cluster(SCRIPT, 3, shards=8, kills=[Kill(4, 0, 0), Kill(9, 0, 5)])
    assert len(done.world.formed) > 2
    assert set(points(done)) == set(points(serial))


def test_a_run_that_resumes_goes_on_with_the_same_points(cluster: Cluster, serial: Done, tmp_path: Path) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER="8")
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path)
    assert done.journal("resumed")
    assert set(points(done)) == set(points(serial))
