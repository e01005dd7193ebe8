"""Keras' fit of its ConvNet for small images."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

import unisono
from benchmarks.frameworks import UNISONO, Note

BATCHES = 64
ENDLESS = 10**6


class Noting(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Notes each step."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """A step is done."""
        self._note()


def train(way: str, batch_size: int, workers: int, note: Note) -> None:
    """Train until the process is stopped."""
    run = unisono.init(batch_size=batch_size, shards=workers) if way == UNISONO else None
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )
    if run is not None:
        model = unisono.keras.Model(model, run)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    images = np.random.rand(BATCHES * batch_size, 28, 28, 1).astype("float32")
    labels = np.arange(len(images)) % 10
    model.fit(images, labels, batch_size=batch_size, epochs=ENDLESS, verbose=0, callbacks=[Noting(note)])
