"""Keras' TensorBoard callback: points of epochs and of batches, histograms, and the graph."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras.src.backend.common import global_state

import unisono

global_state.set_global_attribute("object_name_uids", None)  # names of layers begin anew in this thread
keras.utils.set_random_seed(3)
drawn = np.random.RandomState(5)
x, y = drawn.rand(100, 6).astype("float32"), drawn.randint(0, 3, 100)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
model = unisono.keras.Model(model, checkpoints={"every": 2})
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
board = keras.callbacks.TensorBoard(f"{model.run.dir}/board", histogram_freq=1, update_freq=2)
model.fit(x, y, batch_size=20, epochs=4, verbose=0, validation_split=0.2, callbacks=[board])
print("after fit:", model.evaluate(x, y, verbose=0))
