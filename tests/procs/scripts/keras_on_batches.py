"""Batches of generators, one by one and in trainings; callbacks that see evaluated batches; a talkative test_step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from keras import layers

import unisono

X = np.random.RandomState(3).rand(400, 6).astype("float32")
Y = (4 * X.mean(1)).astype("int64") % 3


made: dict[int, int] = {}


def batches(size: int = 24) -> Iterator[Any]:
    """Endless; draws from a global generator."""
    for count in range(10**6):
        made[size] = count
        rows = np.random.randint(0, 400, size)
        yield X[rows] + np.random.normal(0, 0.01, (size, 6)).astype("float32"), Y[rows]


class Model(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Says of evaluated batches what no metric has."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "relu"), layers.Dense(3, "softmax")
        self.drop = layers.Dropout(0.2)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.drop(self.hidden(inputs), training=training))

    def test_step(self, data: Any) -> Any:
        return {**super().test_step(data), "largest": keras.ops.max(data[0])}


class Seeing(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the batches that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated = 0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.evaluated += 1


keras.utils.set_random_seed(2)
model = unisono.keras.Model(Model(), checkpoints={"every": 3})
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
given, held_out, seeing = batches(), batches(16), Seeing()
said: list[Any] = [model.train_on_batch(x, y, return_dict=True) for x, y in [next(given), next(given)]]
fits: dict[str, Any] = {"verbose": 0, "validation_data": held_out, "validation_steps": 2, "callbacks": [seeing]}
said.append(model.fit(given, epochs=3, steps_per_epoch=3, **fits).history)
said.append(model.evaluate(held_out, steps=3, verbose=0))
said.append(model.predict(held_out, steps=1, verbose=0).tolist()[-1])
said += [model.train_on_batch(X[:40], Y[:40]) for _ in range(2)]
said.append(model.fit(given, epochs=2, steps_per_epoch=3, verbose=0).history)
said.append(model.evaluate(X[:100], Y[:100], verbose=0, return_dict=True))
said += [model.train_on_batch(X[:40], Y[:40]), model.test_on_batch(X[:40], Y[:40]), seeing.evaluated]
said.append(float(model.predict_on_batch(X[:5])[-1, 0]))
next(given)
model.run.print("after all:", json.dumps(said), made)
model.run.finish()
