"""What Keras' own tests expect of single batches, generators, callbacks that see batches, losses without a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import unisono
from unisono.errors import DataError, NonFiniteLoss, UnisonoWarning

Start = Callable[..., unisono.Run]

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("one_worker"),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras makes arrays of tensors in NumPy's old way
]

X = np.random.RandomState(1).rand(60, 6).astype("float32")
Y = np.random.RandomState(2).randint(0, 3, 60)


class Saying(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """Says more of evaluated batches than metrics have."""

    def test_step(self, data: Any) -> Any:
        return {**super().test_step(data), "largest": keras.ops.max(data[0])}


def network(kind: Any = keras.Sequential, **settings: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = kind([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3, "softmax")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"], **settings)
    return model


def weights_are_equal(model: Any, other: Any) -> bool:
    return all(np.array_equal(*pair) for pair in zip(model.get_weights(), other.get_weights(), strict=True))


def test_single_batches_are_trained_evaluated_and_predicted_as_by_keras(start: Start) -> None:
    alone, ours = network(), unisono.keras.Model(network(), start(shards=1))
    weights = np.linspace(0, 2, 60).astype("float32")
    for model in (alone, ours):
        model.said = [
            model.train_on_batch(X, Y),
            model.train_on_batch(X[:20], Y[:20], return_dict=True),
            model.train_on_batch(X, Y, weights),
            model.train_on_batch(X, Y, class_weight={0: 2.0}),
            model.test_on_batch(X, Y),
            model.test_on_batch(X, Y, weights, return_dict=True),
        ]
    assert ours.said == alone.said
    assert weights_are_equal(ours, alone)
    assert np.array_equal(ours.predict_on_batch(X), alone.predict_on_batch(X))


def counted(batches: int) -> Iterator[Any]:
    for number in range(batches):
        rows = slice(10 * (number % 6), 10 * (number % 6) + 10)
        yield X[rows], Y[rows]


def test_a_generator_is_read_as_far_as_keras_reads_it_and_goes_on_there(start: Start) -> None:
    alone, ours = network(), unisono.keras.Model(network(), start(shards=1))
    rest = list[Any]()
    for model in (alone, ours):
        given, held_out = counted(100), counted(100)
        fits: dict[str, Any] = {"steps_per_epoch": 3, "shuffle": False, "verbose": 0}
        model.said = [model.fit(given, epochs=2, **fits).history, model.fit(given, **fits).history]
        model.said.append(model.evaluate(held_out, steps=2, verbose=0))
        model.said.append(model.predict(held_out, steps=2, verbose=0).tolist())
        rest.append(len(list(given)))
    assert ours.said == alone.said
    assert rest[1] == 100 - 9
    assert weights_are_equal(ours, alone)


def test_a_generator_that_has_no_batch_is_told(start: Start) -> None:
    with pytest.raises(DataError, match="the generator has no batches"):
        unisono.keras.Model(network(), start()).fit(counted(0), steps_per_epoch=1)


def test_each_prediction_draws_anew(start: Start) -> None:
    class Random(keras.Sequential):  # type: ignore[misc]
        def predict_step(self, data: Any) -> Any:
            return self(data[0], training=True)

    dropout = Random([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    model = unisono.keras.Model(dropout, start())
    first, second = model.predict(X), model.predict(X)
    assert not np.array_equal(first, second)


def test_callbacks_of_a_script_see_each_evaluated_and_predicted_batch(start: Start) -> None:
    class Seeing(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.said: list[Any] = []

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.said.append((batch, {name: float(value) for name, value in logs.items()}))
            self.model.stop_evaluating = batch == 4

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            self.said.append((batch, logs["outputs"].tolist()))
            self.model.stop_predicting = batch == 1

    said = list[Any]()
    for model in (network(Saying), unisono.keras.Model(network(Saying), start(shards=1))):
        seeing = Seeing()
        history = model.fit(X, Y, shuffle=False, validation_data=(X, Y), verbose=0, callbacks=[seeing]).history
        values = model.evaluate(X, Y, batch_size=10, verbose=0, callbacks=[seeing])
        said.append([history, values, model.predict(X, 20, callbacks=[seeing], verbose=0).tolist(), seeing.said])
    assert said[0] == said[1]


def test_what_test_step_returns_beside_metrics_is_that_of_the_last_batch(start: Start) -> None:
    alone, ours = network(Saying), unisono.keras.Model(network(Saying), start(shards=1))
    results = [model.evaluate(X, Y, 16, verbose=0, return_dict=True) for model in (alone, ours)]
    assert results[0] == results[1]
    assert results[1]["largest"] == X[48:].max()


def test_a_frozen_model_is_fitted_without_an_update(start: Start) -> None:
    frozen = network()
    for layer in frozen.layers:
        layer.trainable = False
    before = frozen.get_weights()
    model = unisono.keras.Model(frozen, start(shards=1))
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        history = model.fit(X, Y, epochs=2, verbose=0).history
    assert history["loss"][0] == pytest.approx(history["loss"][1])
    assert all(np.array_equal(*pair) for pair in zip(before, frozen.get_weights(), strict=True))


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_loss_that_is_no_number_ends_a_training_where_keras_ends_it(start: Start, epochs: int) -> None:
    model, wrong = unisono.keras.Model(network(), start(shards=1)), X.copy()
    wrong[40] = np.inf
    with pytest.raises(NonFiniteLoss):
        model.fit(wrong, Y, batch_size=20, shuffle=False, verbose=0)
    done = model.fit(
        wrong, Y, batch_size=20, shuffle=False, epochs=epochs, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    )
    assert len(done.history["loss"]) == 1
    assert np.isnan(done.history["loss"][0])
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    model.fit(X, Y, verbose=0)


class Endless(keras.utils.PyDataset):  # type: ignore[misc]
    """Says not how many batches it has."""

    def __getitem__(self, number: int) -> Any:
        rows = slice(10 * (number % 6), 10 * (number % 6) + 10)
        return X[rows], Y[rows]

    @property
    def num_batches(self) -> None:
        return None


def test_a_data_set_without_a_number_of_batches_is_read_from_its_first_batch(start: Start) -> None:
    alone, ours = network(), unisono.keras.Model(network(), start(shards=1))
    for model in (alone, ours):
        how: dict[str, Any] = {
            "epochs": 2,
            "steps_per_epoch": 4,
            "class_weight": {1: 2.0},
            "shuffle": False,
            "verbose": 0,
        }
        model.said = model.fit(Endless(), **how).history
    assert ours.said == alone.said


def test_epochs_end_with_the_data_as_in_keras(start: Start) -> None:
    alone, ours = network(), unisono.keras.Model(network(), start(shards=1))
    how: dict[str, Any] = {"batch_size": 16, "epochs": 5, "steps_per_epoch": 3, "shuffle": False, "verbose": 0}
    with pytest.warns(UserWarning, match="ran out of data"):
        expected = alone.fit(X, Y, **how).history
    with pytest.warns(UnisonoWarning, match="epoch 1 has 1 steps"):
        assert ours.fit(X, Y, **how).history == expected
    assert weights_are_equal(ours, alone)
