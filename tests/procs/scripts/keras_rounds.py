"""What a model predicts decides what it is trained with next."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state

import unisono

global_state.set_global_attribute("object_name_uids", None)  # names of layers begin anew in this thread
keras.utils.set_random_seed(3)
drawn = np.random.RandomState(5)
x, y = drawn.rand(100, 6).astype("float32"), drawn.randint(0, 3, 100)


class Exported(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """Tells how often it is exported, which needs packages that are not installed."""

    def export(self, path: Any) -> None:
        with Path(path).open("a") as file:
            file.write("x")


layers: Any = Exported([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
model = unisono.keras.Model(layers, checkpoints={"every": 2})
model.compile("adam", "sparse_categorical_crossentropy")
chosen = np.arange(100)
for _ in range(3):
    model.fit(x[chosen], y[chosen], epochs=2, verbose=0)
    sure = model.predict(x).max(1)
    chosen = np.flatnonzero(sure < np.median(sure))
model.export(model.run.dir / "exported")
print("after all rounds:", chosen.tolist(), float(sure.sum()))
