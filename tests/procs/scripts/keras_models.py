"""Two Keras models by turns, with what changes outside of training steps: layers, files, and draws of callbacks."""

import json
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from keras.src.backend.common import global_state

import unisono

global_state.set_global_attribute("object_name_uids", None)  # names of layers begin anew in this thread
keras.utils.set_random_seed(3)
run = unisono.init(batch_size=32, shards=8, seed=3, checkpoints={"every": 2})
numbers = np.random.RandomState(0)
labels = numbers.randint(0, 3, 100)
samples = (numbers.rand(100, 6) + labels[:, None] / 4).astype("float32")


class Counted(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Counts samples, also those that it does not train with."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(name="seen", initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.seen.assign_add(ops.cast(ops.shape(inputs)[0], "float32"))
        return inputs * (1 + 0.01 * self.seen)


class Drawn(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Draws learning rates from Keras' own generator."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 * float(keras.random.uniform(()))


def model(*hidden: Any) -> Any:
    found = unisono.keras.Model(keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3, "softmax")]), run)
    found.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return found


def fit(trained: Any, **options: Any) -> Any:
    return trained.fit(samples, labels, batch_size=32, verbose=0, **options).history


one, other = model(Counted()), model(layers.Dense(4, "relu"))
first = fit(one, validation_split=0.2, epochs=2)
one.save_weights(path := f"{run.dir}/one.weights.h5")
second = fit(other, callbacks=[Drawn()])
before = one.evaluate(samples, labels, batch_size=8, verbose=0)
third = fit(one)
one.load_weights(path)
fourth = fit(one)
values = one.evaluate(samples, labels, batch_size=8, verbose=0)
run.print("after fits:", json.dumps([first, second, third, fourth]))
run.print("after evaluation:", before, values, float(other.predict(samples, verbose=0).sum()))
run.finish()
