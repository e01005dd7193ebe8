"""Keras' own script with one line changed: a run begins and ends by itself; and fits of several batch sizes."""

import json

import keras
import numpy as np
from keras import layers
from keras.src.backend.common import global_state

import unisono

global_state.set_global_attribute("object_name_uids", None)  # names of layers begin anew in this thread
keras.utils.set_random_seed(3)
digits = np.random.RandomState(0)
labels = digits.randint(0, 3, 100)
images = (digits.rand(100, 6) + labels[:, None] / 4).astype("float32")

model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dropout(0.2), layers.Dense(3, "softmax")])
model = unisono.keras.Model(model)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
before = model.evaluate(images, labels, verbose=0)
first = model.fit(images, labels, epochs=3, verbose=0, validation_split=0.1)
reached = first.history["val_loss"][-1]  # also on workers that came later
second = model.fit(images, labels, batch_size=20, epochs=2, verbose=0)
print("after fit:", json.dumps([first.history, reached, second.history]))
