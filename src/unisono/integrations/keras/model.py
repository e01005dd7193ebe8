"""A Keras model whose ``fit``, ``evaluate`` and ``predict`` distribute their work among the workers of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from keras.src.utils.python_utils import pythonify_logs

from unisono.errors import DataError, ModelError, NonFiniteLoss
from unisono.integrations.kept import evaluate
from unisono.integrations.keras.batch_rows import DrawKey
from unisono.integrations.keras.data import KerasData, split
from unisono.integrations.keras.fitting import Fitting, OneBatch, listed
from unisono.integrations.keras.on_run import OnRun
from unisono.integrations.keras.shard_step import TrainStep, evaluate_block, means_of, predict_block
from unisono.integrations.keras.variables import (
    flat_metrics,
    require_kept,
    require_number,
    results_of,
    scales_loss,
    set_metrics,
)
from unisono.integrations.keras.whole import WholePass, sees_batches
from unisono.integrations.kit import in_words_of, run_for
from unisono.train.run import Run
from unisono.train.step.step import Step

OWN = ("keras_model", "run", "_on_run")

USUAL_BATCH = 32
"""Samples in a batch where nobody says how many, as in Keras."""


class Model:
    """A Keras model that is trained on all workers of a run, to the same bits on any number of them.

    What is not named here is the Keras model's own: attributes, ``compile``, ``summary``, ``save``, ``load_weights``.

    Args:
        model: the Keras model.
        run: the run, from ``unisono.init``. By default the one that is open; if there is none a new one, which is
            finished when the script ends well.
        settings: arguments of :func:`unisono.init` for a new run. Without ``batch_size`` each ``fit`` has its own.

    Attributes:
        keras_model: the Keras model.
        run: the run.

    Raises:
        ModelError: it is no Keras model.
        JobError: there is an active ``keras.distribution``; or settings that cannot work, or that come too late.
    """

    keras_model: Any
    run: Run

    def __init__(self, model: Any, run: Run | None = None, **settings: Any) -> None:
        require_kept(model)
        precision = {"arithmetic.precision": "fp16"} if scales_loss(model) else {}
        self.keras_model, self.run = model, run_for("unisono.keras.Model", run, settings, precision)
        self._on_run = OnRun(model, self.run)

    def __getattr__(self, name: str) -> Any:
        if name in OWN:  # it is being made
            raise AttributeError(name)
        return getattr(self.keras_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.keras_model, name, value)

    def __call__(self, *values: Any, **options: Any) -> Any:
        """Call the Keras model."""
        return self.keras_model(*values, **options)

    def compile(self, *values: Any, **options: Any) -> None:
        """Compile the Keras model.

        Raises:
            ModelError: ``jit_compile=True``, ``steps_per_execution`` above 1, or weights in float16.
        """
        self.keras_model.compile(*values, **options)
        require_kept(self.keras_model)

    def save(self, *values: Any, **options: Any) -> None:
        """Save the Keras model, on the main worker, while the others wait. A run that resumes leaves the file alone."""
        self._on_run.write(partial(self.keras_model.save, *values, **options))

    def save_weights(self, *values: Any, **options: Any) -> None:
        """Save the weights, likewise."""
        self._on_run.write(partial(self.keras_model.save_weights, *values, **options))

    def export(self, *values: Any, **options: Any) -> None:
        """Export the Keras model, likewise."""
        self._on_run.write(partial(self.keras_model.export, *values, **options))

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Make one step with a batch, which is distributed among the workers: a training of its own.

        Args:
            x: arrays in any structure, the same on all workers.
            y: the targets, likewise.
            sample_weight: a weight for each sample.
            class_weight: a weight for each class.
            return_dict: whether to return values by name, instead of in Keras' order.

        Returns:
            the loss and the metrics of the batch.
        """
        model, on_run = self.keras_model, self._on_run
        model._assert_compile_called("train_on_batch")
        samples = KerasData.of(x, DrawKey(self.run.job.seed), y, sample_weight, class_weight)
        if samples.form is None:
            raise DataError(f"train_on_batch of a {type(x).__name__}: give the arrays of one batch, or call fit")
        on_run.get_ready(samples, trains=True)
        model.reset_metrics()
        number, logs = on_run.stepped.count, on_run.known("stepped")
        batch = OneBatch(model, partial(on_run.stepped.set, number))
        loop = self.run.steps(samples.data, 1, shuffle=False, batch_size=len(samples))
        with closing(loop), in_words_of("keras"):
            self._train(batch, samples, loop)
        if logs is None:  # a worker that joins has it from the others; one that was asked to leave makes no step
            logs = self.run.together(lambda workers: workers.broadcast(batch.logs, 0)) or results_of(model)
        on_run.stepped.set(number, logs)
        return logs if return_dict else model._flatten_metrics_in_order(logs)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Evaluate a batch: see :meth:`evaluate`."""
        return self.evaluate(x, y, len(keras.tree.flatten(x)[0]), 0, sample_weight, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Predict a batch: see :meth:`predict`."""
        return self.predict(x, len(keras.tree.flatten(x)[0]))

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Train, as Keras' ``fit`` does: with the model's own ``train_step``, once per shard of each global batch.

        Args:
            x: arrays in any structure, a ``PyDataset``, a ``tf.data.Dataset``, a data set of torch or a ``DataLoader``.
            y: the targets, likewise.
            batch_size: the samples of a global batch, over all workers; by default those of ``unisono.init``, and 32 if
                it says none. A loader decides it itself.
            epochs: the epoch to end before.
            verbose: 0 for no progress bar.
            callbacks: Keras' callbacks. Those that write do so on the main worker.
            validation_split: the share of the samples, the last ones, that is held out.
            validation_data: ``(x, y)``, ``(x, y, sample_weight)``, or what ``x`` may be.
            shuffle: whether to shuffle arrays, or the batches of a ``PyDataset``, in each epoch.
            class_weight: a weight for each class.
            sample_weight: a weight for each sample.
            initial_epoch: the epoch to begin with.
            steps_per_epoch: the most steps of an epoch; the end of the data ends one, too. By default one pass.
            validation_steps: the number of batches to validate with.
            validation_batch_size: the samples in one of them.
            validation_freq: the number of epochs from one validation to the next, or those that end with one.

        Returns:
            Keras' ``History``, the same on all workers.

        Raises:
            DataError: data that cannot be distributed; says what to do.
            JobError: a batch size that cannot be had.
            ModelError: what cannot be kept; says what to do.
        """
        model, run = self.keras_model, self.run
        model._assert_compile_called("fit")
        epochs = min(epochs, keras.config.max_epochs() or epochs)
        steps_per_epoch = min(filter(None, (steps_per_epoch, keras.config.max_steps_per_epoch())), default=None)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split((x, y, sample_weight), validation_split)
        training = DrawKey(run.job.seed, self._on_run.count)
        samples = KerasData.of(x, training, y, sample_weight, class_weight, shuffle=bool(shuffle))
        if samples.is_read_once and steps_per_epoch:  # no batch more is read of a generator
            samples = samples.cut(steps_per_epoch * max(epochs - initial_epoch, 0), 0)
        held_out = None if validation_data is None else self._held_out(validation_data, training)
        require_number(model)
        self._on_run.get_ready(samples, trains=True)
        config = run.inside.loop.config
        size = samples.batch_size or batch_size or config.script_batch_size or USUAL_BATCH
        steps_in_pass = samples.steps(size if config.batch_set_by is None else run.job.batch_size or size)
        passes = samples.passes(max(epochs - initial_epoch, 0), steps_per_epoch, steps_in_pass)
        steps = steps_per_epoch or steps_in_pass
        called = listed(callbacks, model, lambda: run.is_main, verbose, trains=True, epochs=epochs, steps=steps)
        validate = partial(
            self._validate, held_out, validation_freq, called, validation_batch_size or size, validation_steps
        )
        shuffled = None if samples.is_batched or samples.is_stream else bool(shuffle)
        fit = Fitting(model, called, range(initial_epoch, epochs), steps_per_epoch, validate, data=(samples, held_out))
        self._on_run.begin(fit)
        if fit.epochs:
            loop = run.steps(samples.data, passes, shuffle=shuffled, batch_size=samples.size(size))
            run.enter()  # data sets that change hear what they have missed, before anything is read
            # Closed also where training stops early: what follows is behind the loop.
            with closing(loop), in_words_of("keras"):
                self._train(fit, samples, loop)
        return self._on_run.end()

    def _train(self, fit: Fitting | OneBatch, samples: KerasData, steps: Iterable[Step]) -> None:
        update = self._on_run.update
        assert update is not None, "the model is ready"
        results, added, kept = frozenset(results_of(self.keras_model)), self._on_run.added, self._on_run.kept
        for step in steps:
            fit.step_begins(step)
            train_step = TrainStep(
                self.keras_model, samples.unpack, results, self.run, step.size, added, kept, update.idle
            )
            try:
                step.run(train_step, update=update.step)
            except NonFiniteLoss:
                if fit.has_no_number():
                    return
                raise
            if fit.step_ends(step, means_of(kept.settle())):
                self.run.inside.loop.end_here()

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Loss and metrics over data, distributed among the workers, with the model's own ``test_step``.

        What the metrics add up is added up over all samples, so each result is that of all of them (AUC, too).

        Args:
            x: arrays in any structure, a ``PyDataset``, a ``tf.data.Dataset``, a data set of torch or a ``DataLoader``.
            y: the targets, likewise.
            batch_size: the samples in a batch, 32 by default.
            verbose: 0 to show nothing.
            sample_weight: a weight for each sample.
            steps: the number of batches; all by default.
            callbacks: Keras' callbacks, which hear of the beginning and the end.
            return_dict: whether to return values by name, instead of in Keras' order.

        Returns:
            the values.
        """
        self.keras_model._assert_compile_called("evaluate")
        size = batch_size or USUAL_BATCH
        samples = KerasData.of(x, DrawKey(self.run.job.seed), y, sample_weight).cut(steps, size)
        logs = self._evaluate(samples, size, callbacks, verbose, is_kept=True)
        return logs if return_dict else self.keras_model._flatten_metrics_in_order(logs)

    def _evaluate(
        self, samples: KerasData, size: int, callbacks: Any, verbose: Any, *, is_kept: bool = False
    ) -> dict[str, float]:
        model, run, count = self.keras_model, self.run, samples.steps(size)
        self._on_run.get_ready(samples)
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = listed(callbacks, model, lambda: run.is_main, verbose, epochs=1, steps=count)
        callbacks.on_test_begin()
        with samples.epoch():
            known = self._on_run.known("evaluated") if is_kept else None
            result = self._result(samples, size, callbacks) if known is None else known
        set_metrics(model, torch.tensor(result["row"], dtype=torch.float64))
        samples.go_to(result["position"])
        logs = dict(result["logs"])
        if is_kept:
            self._on_run.evaluated.set(self._on_run.evaluated.count, result)
        callbacks.on_test_end(logs)
        return logs

    def _result(self, samples: KerasData, size: int, callbacks: Any) -> dict[str, Any]:
        """Evaluate: each worker some batches, or all of them where that cannot be."""
        model, on_run = self.keras_model, self._on_run

        def result(logs: Mapping[str, Any]) -> dict[str, Any]:
            plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in logs.items()}
            return {"row": flat_metrics(model).tolist(), "logs": plain, "position": samples.position}

        if not (on_run.is_whole or samples.is_read_once or sees_batches(callbacks, "test")):
            row = self._summed(samples, size)
            on_run.is_whole = bool(row[-1])
            if not on_run.is_whole:
                set_metrics(model, row[:-1])
                callbacks.on_test_batch_end((samples.steps(size) or 1) - 1, logs := results_of(model))
                return result(logs)

        def whole() -> dict[str, Any]:
            model.reset_metrics()
            logs = WholePass(self.run, model, samples, size, "test", callbacks).results(lambda logs: logs)[-1]
            return result(pythonify_logs(model._get_metrics_result_or_logs(logs)))

        shared: dict[str, Any] = on_run.shared(whole)
        return shared

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """The model's outputs, distributed among the workers, on each worker.

        Args:
            x: arrays in any structure, a ``PyDataset``, a ``tf.data.Dataset``, a data set of torch or a ``DataLoader``.
            batch_size: the samples in a batch, 32 by default.
            verbose: taken as in Keras; nothing is shown.
            steps: the number of batches; all by default.
            callbacks: Keras' callbacks, which hear of the beginning and the end.

        Returns:
            NumPy arrays, in the structure of the outputs, with one row per sample.
        """
        model, run, size = self.keras_model, self.run, batch_size or USUAL_BATCH
        samples = KerasData.of(x, DrawKey(run.job.seed)).cut(steps, size)
        self._on_run.get_ready(samples, predicts=True)
        called = listed(callbacks, model, lambda: run.is_main, 0, epochs=1, steps=samples.steps(size))
        called.on_predict_begin()
        with samples.epoch():
            outputs = self._on_run.predict(partial(self._outputs, samples, size, called), samples)
        called.on_predict_end()
        return keras.tree.map_structure(_array, outputs)

    def _outputs(self, samples: KerasData, size: int, callbacks: Any, salt: int) -> Any:
        """Predict: each worker some batches, or all of them where a callback sees each."""
        model, run = self.keras_model, self.run
        if not (samples.is_read_once or sees_batches(callbacks, "predict")):
            step = partial(predict_block, model, samples.unpack, salt)
            return run.predict(samples.data, step, batch_size=None if samples.is_batched else size)

        def whole() -> list[Any]:
            one_pass = WholePass(run, model, samples, size, "predict", callbacks, salt)
            parts = one_pass.results(lambda outputs: {"outputs": outputs})
            return [keras.tree.map_structure(lambda *rows: torch.cat(rows), *parts), samples.position]

        outputs, position = self._on_run.shared(whole)
        samples.go_to(position)
        return outputs

    def _summed(self, samples: KerasData, batch_size: int) -> torch.Tensor:
        """Return the sums of the metrics' variables over all samples; behind them 0 if nothing else came of it."""
        step = partial(evaluate_block, self.run, self.keras_model, samples.unpack)
        size = None if samples.is_batched else batch_size
        return evaluate(self.run, lambda evaluation: evaluation.sums(step), samples.data, size)

    def _held_out(self, data: Any, training: DrawKey) -> KerasData:
        x, y, weights = (*data, None, None)[:3] if isinstance(data, tuple | list) else (data, None, None)
        return KerasData.of(x, training.beside, y, weights)

    def _validate(
        self, data: KerasData | None, frequency: Any, callbacks: Any, batch_size: int, steps: int | None, epoch: int
    ) -> dict[str, float]:
        if data is None or not self.keras_model._should_eval(epoch, frequency):
            return {}
        logs = self._evaluate(data.cut(steps, batch_size), batch_size, callbacks, 0)
        return {f"val_{name}": value for name, value in logs.items()}


def _array(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, torch.Tensor):
        raise ModelError(f"predict_step returned a {type(value).__name__}: return tensors with one row per sample")
    return value.cpu().numpy()
