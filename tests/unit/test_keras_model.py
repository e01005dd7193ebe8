"""What a Keras model does on a run: as Keras does by itself, or refused with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import unisono
from unisono.errors import DataError, JobError, LossError, ModelError, UnisonoWarning
from unisono.integrations.keras.fitting import Saving

Start = Callable[..., unisono.Run]

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("one_worker"),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras makes arrays of tensors in NumPy's old way
]

DRAWN = np.random.RandomState(1)
X = DRAWN.rand(90, 6).astype("float32")
Y = DRAWN.randint(0, 3, 90)
WEIGHTS = DRAWN.rand(90).astype("float32")


def network(*, batch_norm: bool = False, policy: str = "float32", kind: Any = keras.Sequential) -> Any:
    keras.utils.clear_session()
    keras.config.set_dtype_policy(policy)
    norm = [keras.layers.BatchNormalization()] if batch_norm else []
    first, last = keras.layers.Dense(8, "relu"), keras.layers.Dense(3, "softmax")
    model = kind([keras.Input((6,)), first, *norm, last])
    keras.config.set_dtype_policy("float32")
    for layer in (first, last):
        layer.set_weights([np.linspace(-1, 1, one.size).reshape(one.shape) for one in layer.get_weights()])
    return model


def compiled(model: Any, **options: Any) -> Any:
    auc = keras.metrics.SparseTopKCategoricalAccuracy(2, name="second")
    settings = {"loss": "sparse_categorical_crossentropy", "weighted_metrics": ["accuracy", auc], **options}
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5), **settings)
    return model


def both(start: Start, *, batch_norm: bool = False, shards: int = 4, **how: Any) -> tuple[Any, Any, Any, Any]:
    """A model and its history from Keras alone, and from a run."""
    alone = compiled(network(batch_norm=batch_norm))
    before = alone.fit(X, Y, batch_size=40, shuffle=False, verbose=0, **how).history
    run = start(batch_size=40, shards=shards)
    ours = compiled(unisono.keras.Model(network(batch_norm=batch_norm), run))
    return alone, before, ours, ours.fit(X, Y, batch_size=40, shuffle=False, verbose=0, **how).history


def test_with_one_shard_weights_and_history_are_those_of_keras_to_the_last_bit(start: Start) -> None:
    alone, before, ours, history = both(start, batch_norm=True, shards=1, epochs=3, validation_split=0.2)
    assert history == before
    assert all(np.array_equal(*pair) for pair in zip(alone.get_weights(), ours.get_weights(), strict=True))


@pytest.mark.parametrize(
    "weights",
    [{}, {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}, {"sample_weight": WEIGHTS}],
    ids=["even", "classes", "samples"],
)
def test_uneven_shards_and_a_partial_batch_give_the_mean_of_keras(start: Start, weights: dict[str, Any]) -> None:
    alone, before, ours, history = both(start, epochs=3, **weights)
    assert before.keys() == history.keys()
    for name, values in before.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4, err_msg=name)
    for one, other in zip(alone.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


def test_evaluation_and_prediction_are_those_of_keras(start: Start) -> None:
    alone, _, ours, _ = both(start, epochs=1)
    alone.set_weights(ours.get_weights())
    found, expected = (one.evaluate(X, Y, sample_weight=WEIGHTS, verbose=0) for one in (ours, alone))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(ours.predict(X), alone.predict(X, verbose=0), rtol=1e-5)
    assert len(ours.predict(X, batch_size=8, steps=3)) == 24


def test_a_run_begins_by_itself_and_a_second_model_trains_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UNISONO_RUN_DIR", str(tmp_path))
    ours = compiled(unisono.keras.Model(network(), shards=4, seed=2))
    with ours.run as run:
        assert (run.job.shards, run.job.seed, run.job.batch_size) == (4, 2, None)
        sizes: list[int] = []
        run.on("step_ends", lambda _, step: sizes.append(step.size))
        ours.fit(X, Y, verbose=0)
        ours.fit(X, Y, batch_size=45, verbose=0)
        assert sizes == [32, 32, 26, 45, 45]
        assert unisono.keras.Model(network()).run is run


def test_a_loader_and_a_data_set_are_taken_as_they_are(start: Start) -> None:
    data = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    _, _, ours, history = both(start, epochs=1)
    again = compiled(unisono.keras.Model(network(), start(batch_size=40, shards=4)))
    assert again.fit(DataLoader(data, batch_size=40), verbose=0).history == history
    assert again.evaluate(data, verbose=0) == ours.evaluate(X, Y, verbose=0)
    np.testing.assert_array_equal(again.predict(data), ours.predict(X))


class Stream(IterableDataset[Any]):
    """The samples, which nobody can index."""

    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


class Samples:
    """A stream that opens its readers itself."""

    def open_reader(self, number: int, readers: int) -> Iterator[Any]:
        return zip(X[number::readers], Y[number::readers], strict=True)


@pytest.mark.parametrize("stream", [lambda: DataLoader(Stream(), batch_size=40), Stream, Samples])
def test_streams_are_trained_on_evaluated_and_predicted(start: Start, stream: Callable[[], Any]) -> None:
    _, _, ours, history = both(start, epochs=2, shards=1, validation_data=(X, Y))
    again = compiled(unisono.keras.Model(network(), start(batch_size=40, shards=1)))
    found = again.fit(stream(), batch_size=40, epochs=2, verbose=0, validation_data=stream(), validation_batch_size=40)
    assert found.history == history
    assert again.evaluate(stream(), verbose=0, batch_size=40) == ours.evaluate(X, Y, verbose=0, batch_size=40)
    np.testing.assert_array_equal(again.predict(stream(), batch_size=40), ours.predict(X, batch_size=40))
    with pytest.raises(DataError, match="have the stream end there"):
        again.evaluate(stream(), steps=1, verbose=0)


def test_targets_and_losses_are_found_by_their_names(start: Start) -> None:
    def heads() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        found = keras.Input((6,))
        outputs = {"size": keras.layers.Dense(1, name="size")(found), "kind": keras.layers.Dense(3, name="kind")(found)}
        return keras.Model(found, outputs)

    def trained(model: Any) -> Any:
        kind = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        losses = {"size": "mse", "kind": kind}
        model.compile("sgd", losses, loss_weights={"size": 2.0, "kind": 1.0}, metrics={"kind": ["accuracy"]})
        targets = {"size": WEIGHTS[:, None], "kind": Y}  # whose names are not in the alphabet's order
        return model.fit(X, targets, batch_size=40, epochs=2, shuffle=False, verbose=0, validation_split=0.2).history

    assert trained(unisono.keras.Model(heads(), start(batch_size=40, shards=1))) == trained(heads())


class Column:
    """What a column of pandas is, which is not needed here."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.values.setflags(write=False)

    def to_numpy(self) -> Any:
        return self.values


def test_a_column_is_read_as_keras_reads_it(start: Start) -> None:
    model = unisono.keras.Model(keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")]), start())
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
    rows, column = (model.fit(X, each, verbose=0, shuffle=False).history for each in (Y[:, None] % 2, Column(Y % 2)))
    assert rows.keys() == column.keys()
    assert model.evaluate(X, Column(Y % 2), verbose=0) == model.evaluate(X, Y[:, None] % 2, verbose=0)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """The samples in batches of 40, or of what somebody says."""

    def __init__(self, stops: Sequence[int] = (40, 80, 90), **options: Any) -> None:
        super().__init__(**options)
        self.stops = [0, *stops]

    def __len__(self) -> int:
        return len(self.stops) - 1

    def __getitem__(self, number: int) -> Any:
        rows = slice(self.stops[number], self.stops[number + 1])
        return X[rows], Y[rows]


class Shrinking(Batches):
    """Has one batch less in each epoch."""

    def on_epoch_end(self) -> None:
        del self.stops[-1]


def test_batches_of_a_data_set_are_global_batches(start: Start) -> None:
    _, _, ours, history = both(start, epochs=2, validation_data=(X[:80], Y[:80]))
    again = compiled(unisono.keras.Model(network(), start(batch_size=40, shards=4)))
    training, held_out = Batches(workers=2, use_multiprocessing=True), Batches((40, 80))
    found = again.fit(training, epochs=2, shuffle=False, verbose=0, validation_data=held_out)
    assert found.history == history
    assert all(np.array_equal(*pair) for pair in zip(again.get_weights(), ours.get_weights(), strict=True))
    assert again.evaluate(held_out, verbose=0, steps=1) == ours.evaluate(X[:40], Y[:40], verbose=0, batch_size=40)
    np.testing.assert_array_equal(again.predict(training), ours.predict(X, batch_size=40))


def test_batches_weigh_by_class_as_in_keras_alone(start: Start) -> None:
    how: dict[str, Any] = {"epochs": 2, "class_weight": {0: 1.0, 1: 3.0}, "shuffle": False, "verbose": 0}
    before = compiled(network()).fit(Batches(), **how).history
    history = compiled(unisono.keras.Model(network(), start(shards=1))).fit(Batches(), **how).history
    assert history == before


def test_what_a_train_step_returns_besides_metrics_is_the_mean_over_the_batch(start: Start) -> None:
    class Logging(keras.Sequential):  # type: ignore[misc]  # Keras has no types
        def train_step(self, data: Any) -> dict[str, Any]:
            return {**super().train_step(data), "mean": data[0].mean()}

    keras.utils.clear_session()
    layers = [keras.Input((6,)), keras.layers.Dense(3, activation="softmax")]
    model = compiled(unisono.keras.Model(Logging(layers), start(batch_size=90, shards=4)))
    (found,) = model.fit(X, Y, verbose=0).history["mean"]
    assert found == pytest.approx(X.mean(), rel=1e-5)


class Vectors(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """Returns a vector, and counts its calls."""

    calls = 0

    def train_step(self, data: Any) -> Any:
        self.calls += 1
        return super().train_step(data) | {"inputs": keras.ops.mean(data[0], axis=0)}


def test_a_vector_that_a_train_step_returns_is_the_mean_over_the_batch(start: Start) -> None:
    def trained(model: Any) -> Any:
        return compiled(model).fit(X, Y, batch_size=40, shuffle=False, verbose=0).history["inputs"]

    net, run = network(kind=Vectors), start(batch_size=40, shards=4)
    np.testing.assert_allclose(trained(unisono.keras.Model(net, run)), trained(network(kind=Vectors)), rtol=1e-5)
    assert net.calls == 3 * 4


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_model_predicts_without_anything_to_train_with(start: Start, is_frozen: bool) -> None:
    alone, net = network(), network()
    net.trainable = not is_frozen
    ours = unisono.keras.Model(net, start())
    np.testing.assert_allclose(ours.predict(X), alone.predict(X, verbose=0), rtol=1e-6)
    if is_frozen:
        ours.compile(loss="sparse_categorical_crossentropy")
        alone.compile(loss="sparse_categorical_crossentropy")
        assert ours.evaluate(X, Y) == pytest.approx(alone.evaluate(X, Y, verbose=0))


class OfAll(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """The train_step of Keras' guide, which returns what each metric comes to, and all compiled ones as one."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {**super().train_step(data), **{one.name: one.result() for one in self.metrics}}


class Seen(keras.metrics.Metric):  # type: ignore[misc]  # Keras has no types
    """Comes to a variable, as in Keras' guide to metrics."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.samples = self.add_weight(name="samples", initializer="zeros")

    def update_state(self, truth: Any, found: Any, sample_weight: Any = None) -> None:
        self.samples.assign_add(len(truth))

    def result(self) -> Any:
        return self.samples


def test_metrics_that_stand_for_several_or_come_to_a_variable_are_read(start: Start) -> None:
    layers = [keras.Input((6,)), keras.layers.Dense(3, activation="softmax")]
    model = compiled(unisono.keras.Model(OfAll(layers), start(batch_size=40, shards=4)), metrics=[Seen()])
    assert model.fit(X, Y, verbose=0).history["seen"] == [90.0]
    assert model.evaluate(X, Y, verbose=0, return_dict=True)["seen"] == 90.0


def test_frozen_layers_stay_and_thawed_ones_are_trained_after_another_compile(start: Start) -> None:
    model = unisono.keras.Model(network(batch_norm=True), start(batch_size=30, shards=2))
    model.layers[0].trainable = False
    first = model.layers[0].get_weights()
    compiled(model).fit(X, Y, verbose=0)
    assert all(np.array_equal(*pair) for pair in zip(first, model.layers[0].get_weights(), strict=True))
    model.layers[0].trainable = True
    compiled(model).fit(X, Y, verbose=0)
    assert not any(np.array_equal(*pair) for pair in zip(first, model.layers[0].get_weights(), strict=True))


def test_the_wrapped_model_is_read_and_set_through_the_wrapper(start: Start, tmp_path: Path) -> None:
    model = compiled(unisono.keras.Model(network(), start()))
    model.trainable = False
    assert model.keras_model.trainable is False
    model.save_weights(path := tmp_path / "some.weights.h5")
    before = model.get_weights()
    model.set_weights([one + 1 for one in before])
    model.load_weights(path)
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    assert model(X[:2]).shape == (2, 3)
    with pytest.raises(AttributeError):
        _ = model.unheard_of


class Twice(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """Has two optimizers."""

    def train_step(self, data: Any) -> Any:
        values = super().train_step(data)
        self.other.apply([one.value.grad for one in self.trainable_variables], self.trainable_variables)
        return values


class FromOne(keras.metrics.SparseCategoricalAccuracy):  # type: ignore[misc]  # Keras has no types
    """Begins with one."""

    def reset_state(self) -> None:
        self.total.assign(1.0)


def twice() -> Any:
    model = Twice([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.other = keras.optimizers.SGD(0.1)
    return model


def test_an_epoch_has_as_many_steps_as_is_said_and_the_learning_rate_warms_up_in_them(start: Start) -> None:
    rates: list[float] = []
    model = compiled(unisono.keras.Model(network(), start(batch_size=40)))
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    warm = unisono.keras.LearningRateWarmup(4)
    with pytest.warns(UnisonoWarning, match="epoch 2 has 1 steps, and steps_per_epoch is 2: the data ended"):
        history = model.fit(
            X,
            Y,
            epochs=4,
            initial_epoch=1,
            steps_per_epoch=2,
            verbose=0,
            callbacks=[warm, noted],
            validation_data=(X, Y),
        )
    assert history.epoch == [1, 2, 3]
    assert len(history.history["val_loss"]) == 3
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    with pytest.raises(JobError, match="at least 1"):
        unisono.keras.LearningRateWarmup(0)


def stateful() -> Any:
    layers = [keras.Input(batch_shape=(30, 2, 3)), keras.layers.LSTM(3, stateful=True)]
    return keras.Sequential(layers)


class Averaging(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """Has weights that train_step itself moves."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.layers[0].kernel.assign(0.9 * self.layers[0].kernel)
        return logs


def averaging() -> Any:
    model = network(kind=Averaging)
    model.layers[0].trainable = False
    return model


def fit(*data: Any, **how: Any) -> Callable[[Any], Any]:
    return lambda model: compiled(model).fit(*data, **how)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "jit": (lambda model: compiled(model, jit_compile=True), ModelError, "leave it out"),
    "executions": (lambda model: compiled(model, steps_per_execution=2), ModelError, "use 1"),
    "metric": (lambda model: compiled(model, metrics=[FromOne()]).fit(X, Y), ModelError, "begin with zeros"),
    "stateful": (lambda model: unisono.keras.Model(stateful()), ModelError, "lstm.* has stateful=True"),
    "settings": (lambda model: unisono.keras.Model(network(), seed=1, shards=2), JobError, "beside a run that is open"),
    "generator": (fit(iter([(X, Y)])), DataError, "give arrays, a PyDataset"),
    "beside": (fit(Batches(), Y), DataError, "y beside a Batches: let it return"),
    "uneven": (fit(Batches((40, 60, 90))), DataError, "batch 1 of Batches has 20 samples"),
    "shrinking": (fit(Shrinking(), epochs=2), DataError, "has 2 batches, and had 3"),
    "no batches": (fit(Batches(())), DataError, "has no batches"),
    "empty": (fit(X[:0], Y[:0]), DataError, "no batch: there are no samples"),
    "nothing left": (
        fit(DataLoader(TensorDataset(torch.tensor(X[:3])), 5, drop_last=True)),
        DataError,
        "drop_last or a sampler",
    ),
    "lengths": (fit(X, Y[:7]), DataError, "7 and 90 samples"),
    "both weights": (fit(X, Y, sample_weight=WEIGHTS, class_weight={0: 2.0}), DataError, "at the same time"),
    "backup": (fit(X, Y, callbacks=[keras.callbacks.BackupAndRestore("there")]), JobError, "checkpoints="),
    "two optimizers": (
        lambda model: compiled(unisono.keras.Model(twice(), model.run)).fit(X, Y),
        ModelError,
        "2 times",
    ),
    "own average": (
        lambda model: compiled(unisono.keras.Model(averaging(), model.run)).fit(X, Y),
        ModelError,
        "Change weights in a callback's on_train_batch_end",
    ),
    "no model": (lambda model: unisono.keras.Model(torch.nn.Linear(1, 1), model.run), ModelError, "got Linear"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_is_refused_with_what_to_do(start: Start, what: str) -> None:
    act, kind, words = REFUSED[what]
    model = unisono.keras.Model(network(), start())
    with pytest.raises(kind, match=words):
        act(model)


HALF = "mixed_float16"
OVERFLOWING = X * np.where(np.arange(90) == 50, 1e4, 1.0)[:, None]
"""In float16, in batch 1 of 40 samples."""


def test_float16_is_that_of_keras_to_the_last_bit(start: Start) -> None:
    def fitted(model: Any) -> Any:
        inner = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, 2.0**16), "sparse_categorical_crossentropy")
        model.fit(OVERFLOWING, Y, batch_size=40, epochs=3, shuffle=False, verbose=0)
        return model

    alone = fitted(network(policy=HALF))
    run = start(batch_size=40, shards=1, arithmetic={"precision": "fp16"})
    ours = fitted(unisono.keras.Model(network(policy=HALF), run))
    assert all(np.array_equal(*pair) for pair in zip(alone.get_weights(), ours.get_weights(), strict=True))
    scale = run.inside.trained.loss_scale.value
    assert float(alone.optimizer.dynamic_scale) == scale < 2**16
    assert int(ours.optimizer.iterations) == int(alone.optimizer.iterations) < 9
    assert np.array_equal(ours.predict(X), alone.predict(X, verbose=0))
    assert ours.evaluate(X, Y) == pytest.approx(alone.evaluate(X, Y, verbose=0))


class Unscaled(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    def train_step(self, data: Any) -> dict[str, Any]:
        loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
        loss.backward()
        self.optimizer.apply([one.value.grad for one in self.trainable_variables], self.trainable_variables)
        return {"loss": loss}


def test_a_train_step_that_leaves_the_loss_as_it_is_is_told_to_scale_it(start: Start) -> None:
    model = compiled(unisono.keras.Model(network(policy=HALF, kind=Unscaled), start(arithmetic={"precision": "fp16"})))
    with pytest.raises(LossError, match="optimizer.scale_loss"):
        model.fit(X, Y, verbose=0)


def test_float16_needs_a_run_that_scales_and_weights_in_float32(start: Start, tmp_path: Path) -> None:
    own = unisono.keras.Model(network(policy=HALF), shards=2, run_dir=tmp_path / "own")
    precision = own.run.job.precision
    own.run.close()
    assert precision == "fp16"
    model = compiled(unisono.keras.Model(network(policy=HALF), start()))
    with pytest.raises(JobError, match="say arithmetic={'precision': 'fp16'} where it begins"):
        model.fit(X, Y, verbose=0)
    with pytest.raises(ModelError, match="kernel is in float16, where small updates are lost"):
        compiled(unisono.keras.Model(network(policy="float16"), model.run))


class Remembering(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Keeps what no checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = object()


def test_a_callback_that_cannot_be_kept_is_named(start: Start) -> None:
    model = compiled(unisono.keras.Model(network(), start()))
    with pytest.warns(UnisonoWarning, match="the callback Remembering has seen, which checkpoints"):
        model.fit(X, Y, verbose=0, callbacks=[Remembering()])


def test_a_checkpoint_whose_writing_ends_early_leaves_the_one_before(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "best.weights.h5"
    saving = Saving(model, lambda: True)
    saving.save_weights(path, overwrite=True)
    before = path.read_bytes()
    model.save_weights = lambda part, **_: Path(part).write_text("half") and 1 / 0
    with pytest.raises(ZeroDivisionError):
        saving.save_weights(path, overwrite=True)
    assert path.read_bytes() == before
    Saving(model, lambda: False).save_weights(path)


class Products(keras.layers.Layer):  # type: ignore[misc]
    """Notes in which dtype torch multiplies matrices beside it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[torch.dtype] = []

    def call(self, inputs: Any) -> Any:
        self.seen.append((inputs.float() @ torch.ones(inputs.shape[-1], 1)).dtype)
        return inputs


def test_one_layer_in_float16_puts_no_other_layer_under_autocast(start: Start) -> None:
    products = Products(dtype="float32")
    half, last = keras.layers.Dense(8, dtype=HALF), keras.layers.Dense(3, "softmax", dtype="float32")
    model = unisono.keras.Model(
        keras.Sequential([keras.Input((6,)), products, half, last]), start(arithmetic={"precision": "fp16"})
    )
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "sparse_categorical_crossentropy")
    model.fit(X, Y, batch_size=32, verbose=0)
    assert set(products.seen) == {torch.float32}
