"""Keras on ``tf.data``, where tensorflow is installed: ``make with-tensorflow`` has it in a venv of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import unisono
from script_cluster import Cluster, Done, Kill
from unisono.errors import DataError

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip(
    "tensorflow", reason="tensorflow is not installed: make with-tensorflow tests Keras on tf.data"
)

Start = Callable[..., unisono.Run]
plain = tf.autograph.experimental.do_not_convert  # else tensorflow leaves a temporary file for each function

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras makes arrays of tensors in NumPy's old way
]

SCRIPT = Path(__file__).parents[1] / "procs" / "scripts" / "keras_tf_data.py"
X = np.random.RandomState(1).rand(90, 6).astype("float32")
Y = np.random.RandomState(2).randint(0, 3, 90)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("tf"))


@pytest.fixture(scope="module")
def serial(cluster: Cluster) -> Done:
    return cluster(SCRIPT, 1, shards=8)


def same(done: Done, serial: Done) -> None:
    said, expected = ([line for line in one.said if re.match("after (fit|pred)", line)] for one in (done, serial))
    assert len(said) == 2
    assert (done.outcome, said) == (serial.outcome, expected)


def test_nothing_shows_that_workers_were_killed_and_others_came(cluster: Cluster, serial: Done) -> None:
    kills = [Kill(step, rank, 5) for step, rank in ((4, 1), (5, 0), (9, 2), (19, 0), (43, 1))]
    done = cluster(SCRIPT, 3, shards=8, kills=kills)
    assert len(done.world.formed) > 5
    same(done, serial)


@pytest.mark.parametrize("stop", [3, 22])
def test_a_run_resumes_on_another_number_of_workers(cluster: Cluster, serial: Done, stop: int, tmp_path: Path) -> None:
    cluster(SCRIPT, 3, shards=8, folder=tmp_path, UNISONO_STOP_AFTER=str(stop))
    done = cluster(SCRIPT, 2, shards=8, folder=tmp_path)
    assert done.journal("resumed")
    same(done, serial)


def network() -> Any:
    keras.utils.clear_session()
    layer = keras.layers.Dense(3, "softmax")
    model = keras.Sequential([keras.Input((6,)), layer])
    layer.set_weights([np.linspace(-1, 1, one.size).reshape(one.shape) for one in layer.get_weights()])
    return model


def compiled(model: Any) -> Any:
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def samples(**how: Any) -> Any:
    found = tf.data.Dataset.from_tensor_slices((X, Y))
    return found.shuffle(50, seed=3, **how).batch(20)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras', of data whose length it learns
@pytest.mark.usefixtures("one_worker")
def test_with_one_shard_weights_and_history_are_those_of_keras_in_the_same_order(start: Start) -> None:
    held_out = tf.data.Dataset.from_tensor_slices((X, Y)).filter(plain(lambda x, y: y > 0)).batch(7)
    how: dict[str, Any] = {"epochs": 3, "class_weight": {0: 1.0, 1: 2.0, 2: 1.0}, "validation_data": held_out}
    alone, ours = compiled(network()), compiled(unisono.keras.Model(network(), start(shards=1)))
    alone.build((None, 6))
    before = alone.fit(samples(), verbose=0, shuffle=False, **how).history
    iter(data := samples())  # the first pass, which Keras uses up for the shapes
    history = ours.fit(data, verbose=0, shuffle=False, **how).history
    for name, values in before.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6, err_msg=name)
    for one, other in zip(alone.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    np.testing.assert_allclose(ours.predict(held_out), alone.predict(held_out, verbose=0), rtol=1e-5)


def hidden() -> Any:
    inner = samples()
    return tf.data.Dataset.range(2).flat_map(plain(lambda _: inner))


def drawn(x: Any, y: Any) -> Any:
    return x + tf.random.uniform((6,), seed=3), y


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "endless": (lambda: samples().repeat(), {}, "never ends: say steps"),
    "no batches": (lambda: samples().take(0), {}, "no batch"),
    "not batched": (lambda: samples().unbatch(), {}, "Have it give batches"),
    "beside": (samples, {"y": Y}, "let it return"),
    "another one": (hidden, {}, "make that data set inside of the function"),
    "text": (lambda: tf.data.Dataset.from_tensor_slices((["a"] * 9, [0] * 9)).batch(3), {}, "string, which torch"),
    "parallel draws": (
        lambda: tf.data.Dataset.from_tensor_slices((X, Y)).map(plain(drawn), num_parallel_calls=2).batch(20),
        {},
        "stateless",
    ),
    "new numbers": (
        lambda: tf.data.Dataset.zip(samples().unbatch(), tf.data.Dataset.random(1, True)).batch(20),
        {},
        "leave that out",
    ),
}


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_again_is_refused_with_what_to_do(start: Start, what: str) -> None:
    data, how, words = REFUSED[what]
    model = compiled(unisono.keras.Model(network(), start()))
    with pytest.raises(DataError, match=words):
        model.fit(data(), verbose=0, **how)


UNSEEDED = """
import keras, numpy as np, tensorflow as tf, unisono
from keras.src.backend.common import global_state
global_state.set_global_attribute("object_name_uids", None)
model = unisono.keras.Model(keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
found = tf.data.Dataset.from_tensor_slices((np.random.RandomState(0).rand(90, 6), np.arange(90.0)))
model.fit(found.shuffle(90).batch(20), verbose=0)
"""


def test_a_shuffle_without_a_seed_is_refused_with_the_cure(cluster: Cluster, tmp_path: Path) -> None:
    (script := tmp_path / "unseeded.py").write_text(UNSEEDED)
    with pytest.raises(unisono.errors.JobMismatch, match="give shuffle and list_files a seed"):
        cluster(script, 2, shards=8)
