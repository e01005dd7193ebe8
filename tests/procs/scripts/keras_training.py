"""A Keras model with all that shards change: moving statistics, seeds, metrics; and callbacks that decide."""

import json
import sys
from typing import Any

import keras
import numpy as np
from keras import layers
from keras.src.backend.common import global_state

import unisono

global_state.set_global_attribute("object_name_uids", None)  # names of layers begin anew in this thread
run = unisono.init(batch_size=32, shards=8, seed=3, checkpoints={"every": 4})
digits = np.random.RandomState(0)
labels = digits.randint(0, 3, 130)
images = (digits.rand(130, 6, 6, 1) + labels[:, None, None, None] / 4).astype("float32")


class Seeing(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """Keeps how many samples it was trained with, and the labels."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers)
        self.seen, self.labels = 0, list[int]()

    def train_step(self, data: Any) -> Any:
        self.seen += len(data[0])
        self.labels.append(int(data[1].argmax(-1).sum()))
        return super().train_step(data)


seeing = Seeing(
    [
        keras.Input((6, 6, 1)),
        layers.RandomFlip(),
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(momentum=0.9),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(3, activation="softmax"),
    ]
)
model = unisono.keras.Model(seeing, run)
optimizer = keras.optimizers.AdamW(0.01, clipnorm=0.5, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2)
model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy", "auc"])


class Counting(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Counts batches, and lowers the learning rate by them."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches % 9 == 0:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.9


folder = run.dir
counting = Counting()
history = model.fit(
    images,
    keras.utils.to_categorical(labels),
    batch_size=32,
    epochs=4,
    verbose=0,
    validation_split=0.1,
    class_weight={0: 1.0, 1: 2.0, 2: 0.5},
    callbacks=[
        keras.callbacks.ReduceLROnPlateau(monitor="val_auc", mode="max", patience=1, factor=0.5, min_delta=0.2),
        keras.callbacks.EarlyStopping(monitor="loss", patience=3, restore_best_weights=True),
        *([] if "unlogged" in sys.argv else [keras.callbacks.CSVLogger(f"{folder}/epochs.csv")]),
        keras.callbacks.ModelCheckpoint(f"{folder}/best.weights.h5", save_best_only=True, save_weights_only=True),
        counting,
    ],
)
run.print("after fit:", json.dumps(history.history), history.epoch, counting.batches, seeing.seen, list(seeing.labels))
values = model.evaluate(images, keras.utils.to_categorical(labels), verbose=0)
warm = unisono.keras.LearningRateWarmup(6)
again = model.fit(
    images,
    keras.utils.to_categorical(labels),
    epochs=4,
    initial_epoch=1,
    steps_per_epoch=3,
    verbose=0,
    callbacks=[warm],
)
run.print("after evaluation:", values)
run.print("after two fits:", json.dumps(history.history), json.dumps(again.history))
rows = model.predict(images[:50], batch_size=8)
run.print("after prediction:", rows.shape, float(rows[-1, 0]))
run.finish()
