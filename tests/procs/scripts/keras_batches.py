"""Keras on data sets that give whole batches, draw, and change between epochs."""

import json
from math import ceil
from typing import Any

import keras
import numpy as np
from keras import layers
from keras.src.backend.common import global_state

import unisono

global_state.set_global_attribute("object_name_uids", None)  # names of layers begin anew in this thread
keras.utils.set_random_seed(3)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """Noisy points; which of them a batch has changes with each epoch."""

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__(**options)
        drawn = np.random.RandomState(count)
        self.y = drawn.randint(0, 3, count)
        self.x = (drawn.rand(count, 6) + self.y[:, None] / 4).astype("float32")
        self.order = np.arange(count)
        self.own = np.random.default_rng(0)

    def __len__(self) -> int:
        return ceil(len(self.y) / 16)

    def __getitem__(self, number: int) -> Any:
        rows = self.order[16 * number : 16 * number + 16]
        noise = np.random.normal(0, 0.01, (len(rows), 6)) + self.own.normal(0, 0.01, (len(rows), 6))
        return {"point": self.x[rows] + noise}, self.y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)
        self.own.shuffle(self.order)


points = keras.Input((6,), name="point")
hidden = layers.Dropout(0.2)(layers.Dense(8, "relu")(points))
model = keras.Model({"point": points}, layers.Dense(3, "softmax")(hidden))
model = unisono.keras.Model(model, checkpoints={"every": 4})
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
training, held_out = Batches(90), Batches(40)
first = model.fit(training, epochs=3, verbose=0, validation_data=held_out, class_weight={1: 2.0})
second = model.fit(training, epochs=3, steps_per_epoch=4, verbose=0, shuffle=False, validation_data=held_out)
print("after fit:", json.dumps([first.history, second.history]))
print("after all:", training.order.tolist(), model.predict(held_out, steps=2).shape)
