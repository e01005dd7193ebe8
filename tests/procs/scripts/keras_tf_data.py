"""Keras on tf.data: shuffled, cached, mapped in parallel, endless, and of a length that nobody knows."""

import json
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.src.backend.common import global_state

import unisono

global_state.set_global_attribute("object_name_uids", None)  # names of layers begin anew in this thread
keras.utils.set_random_seed(3)
drawn = np.random.RandomState(5)
labels = drawn.randint(0, 3, 150)
points = (drawn.rand(150, 6) + labels[:, None] / 4).astype("float32")
whole = tf.data.Dataset.from_tensor_slices(({"point": points}, labels))


plain = tf.autograph.experimental.do_not_convert  # else tensorflow leaves a temporary file for each function


@plain  # type: ignore[untyped-decorator]  # tensorflow may not be installed
def noisy(sample: Any, number: Any) -> Any:
    """A sample with noise that follows from a number."""
    inputs, label = sample
    noise = tf.random.stateless_uniform((6,), (number, 7), 0.0, 0.1)
    return {"point": inputs["point"] + noise}, label


counted = tf.data.Dataset.zip(whole.take(110).cache(), tf.data.Dataset.random(seed=4))
training = counted.shuffle(40).map(noisy, num_parallel_calls=2).batch(20).prefetch(2)
held_out = whole.skip(110).batch(16)
repeated = whole.take(90).shuffle(90, seed=2).repeat().batch(24).prefetch(2)
filtered = whole.filter(plain(lambda inputs, label: label > 0)).shuffle(30, seed=8).repeat(2).batch(16)

inputs = keras.Input((6,), name="point")
hidden = layers.Dropout(0.2)(layers.BatchNormalization()(layers.Dense(8, "relu")(inputs)))
model = keras.Model({"point": inputs}, layers.Dense(3, "softmax")(hidden))
model = unisono.keras.Model(model, checkpoints={"every": 4})
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
said = [model.fit(training, epochs=3, verbose=0, validation_data=held_out, class_weight={1: 2.0})]
evaluated = [model.evaluate(training, verbose=0), model.evaluate(repeated, steps=5, verbose=0)]
said.append(model.fit(repeated, epochs=2, steps_per_epoch=5, verbose=0, validation_data=training, validation_steps=2))
said.append(model.fit(filtered, epochs=2, verbose=0))
said.append(model.fit(training, epochs=2, steps_per_epoch=4, verbose=0))
print("after fit:", json.dumps([one.history for one in said]), evaluated)
print("after prediction:", [float(one) for one in model.predict(filtered)[:, 0]][-5:])
