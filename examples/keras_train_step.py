"""A Keras model with a ``train_step`` of its own: it runs once per shard, and its optimizer once per step.

    python examples/keras_train_step.py                   one worker
    unisono run -n 3 examples/keras_train_step.py         three workers, the same weights to the last bit

Needs pip install '.[keras]' in a clone.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch

import unisono

keras.utils.set_random_seed(0)


class CustomModel(keras.Model):
    """That of Keras' guide to custom training steps, with a Dropout layer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        """Train on a shard of the global batch."""
        x, y = data
        y_pred = self(x, training=True)
        loss = self.loss_fn(y, y_pred)

        self.zero_grad()
        loss.backward()
        trainable_weights = list(self.trainable_weights)
        gradients = [v.value.grad for v in trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, trainable_weights)

        self.loss_tracker.update_state(loss, sample_weight=len(x))
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self):
        """What Keras resets in each epoch."""
        return [self.loss_tracker, self.mae_metric]


inputs = keras.Input(shape=(32,))
hidden = keras.layers.Dropout(0.1)(keras.layers.Dense(32, activation="relu")(inputs))
model = unisono.keras.Model(CustomModel(inputs, keras.layers.Dense(1)(hidden)))
model.compile(optimizer=keras.optimizers.Adam(clipnorm=1.0))

x = np.random.random((1000, 32)).astype("float32")
y = x.sum(axis=1, keepdims=True)
history = model.fit(x, y, epochs=5, verbose=2)
print("history:", history.history)
