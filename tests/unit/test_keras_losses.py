"""Losses with masks, weights and other reductions are those of Keras alone, however a batch is cut into shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses

import unisono
from unisono.errors import ModelError

Start = Callable[..., unisono.Run]

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("one_worker"),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras makes arrays of tensors in NumPy's old way
]

DRAWN = np.random.RandomState(1)
LENGTHS = DRAWN.randint(1, 8, 50)
WORDS = np.where(np.arange(8) < LENGTHS[:, None], DRAWN.randint(1, 9, (50, 8)), 0)
TAGS = DRAWN.randint(0, 3, (50, 8))
WEIGHTS = DRAWN.rand(50, 8).astype("float32")


class Adds(layers.Layer):  # type: ignore[misc]  # Keras is not looked into by mypy
    """Adds a loss of what comes through: its sum over the samples, or its mean."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.reduce = keras.ops.sum if kind == "sum" else keras.ops.mean

    def call(self, inputs: Any) -> Any:
        self.add_loss(1e-2 * self.reduce(keras.ops.square(inputs)))
        return inputs


def tagger(*, has_mask: bool = True, heads: int = 1, adds: str = "") -> Any:
    """A network that gives each word a tag."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    words = keras.Input((8,), dtype="int32")
    found = layers.Embedding(9, 4, mask_zero=has_mask)(words)
    found = Adds(adds)(found) if adds else found
    last = layers.Dense(3, kernel_regularizer="l2")
    outputs = [last(found), *(layers.Dense(3, name=f"head{number}")(found) for number in range(1, heads))]
    return keras.Model(words, outputs if heads > 1 else outputs[0])


def categorical(**options: Any) -> Any:
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "masked": ({}, categorical, None),
    "masked and weighted": ({}, categorical, WEIGHTS),
    "ignored": ({"has_mask": False}, lambda: categorical(ignore_class=2), None),
    "by weight": ({"has_mask": False}, lambda: categorical(reduction="mean_with_sample_weight"), WEIGHTS),
    "by no weight": ({"has_mask": False}, lambda: categorical(reduction="mean_with_sample_weight"), None),
    "sum": ({"has_mask": False}, lambda: categorical(reduction="sum"), None),
    "a sum that a layer adds": ({"has_mask": False, "adds": "sum"}, categorical, None),
    "a mean that a layer adds": ({"has_mask": False, "adds": "mean"}, categorical, None),
    "two masked": ({"heads": 2}, lambda: [categorical(), categorical()], None),
    "a sum beside a mean": (
        {"heads": 2, "has_mask": False},
        lambda: [categorical(), categorical(reduction="sum")],
        None,
    ),
}


def trained(model: Any, loss: Any, weights: Any, heads: int) -> dict[str, list[float]]:
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    targets = TAGS if heads == 1 else [TAGS] * heads
    history = model.fit(WORDS, targets, batch_size=20, epochs=3, shuffle=False, verbose=0, sample_weight=weights)
    return {"loss": history.history["loss"], "evaluated": model.evaluate(WORDS, targets, 20, verbose=0)}


@pytest.mark.parametrize("case", CASES)
def test_shards_come_to_the_loss_and_the_weights_of_keras_alone(start: Start, case: str) -> None:
    how, loss, weights = CASES[case]
    heads = how.get("heads", 1)
    alone = tagger(**how)
    before = trained(alone, loss(), weights, heads)
    ours = unisono.keras.Model(tagger(**how), start(batch_size=20, shards=4))
    found = trained(ours, loss(), weights, heads)
    for name, values in before.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    for one, other in zip(alone.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


def test_losses_over_different_things_and_losses_that_are_no_number_are_refused(start: Start) -> None:
    two = unisono.keras.Model(tagger(heads=2), start(batch_size=20, shards=4))
    with pytest.raises(ModelError, match=r"means over different things .* or reduction='sum'"):
        trained(two, [categorical(), categorical(ignore_class=1)], None, 2)
    with pytest.raises(ModelError, match="has reduction=None, so it is no number: use 'sum_over_batch_size'"):
        trained(two, [categorical(), categorical(reduction=None)], None, 2)


class Evaluates(keras.callbacks.Callback):  # type: ignore[misc]
    """Evaluates other data at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.values.append(self.model.evaluate(WORDS[:13], TAGS[:13], verbose=0))


def test_a_callback_may_evaluate_other_data_as_with_keras_alone(start: Start) -> None:
    alone, ours = tagger(), unisono.keras.Model(tagger(), start(batch_size=20, shards=4))
    values = []
    for model in (alone, ours):
        model.compile(keras.optimizers.SGD(0.01), categorical())
        callback = Evaluates()
        model.fit(WORDS, TAGS, batch_size=20, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
        values.append(callback.values)
    np.testing.assert_allclose(values[1], values[0], rtol=1e-4)
