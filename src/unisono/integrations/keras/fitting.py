"""A call of ``fit``: its epochs and batches, the callbacks that each worker calls, and the state that is kept."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import keras
from keras.callbacks import Callback as KerasCallback
from keras.src.callbacks.monitor_callback import MonitorCallback

from unisono.errors import JobError
from unisono.host.tracebacks import warn
from unisono.integrations.kept import KeptAttributes, KeptCallbacks
from unisono.integrations.keras.data import KerasData
from unisono.integrations.keras.shard_step import PREFIX, LossTracker
from unisono.integrations.keras.variables import results_of
from unisono.integrations.kit import refused
from unisono.train.step.step import Step

WRITERS = ("ProgbarLogger", "CSVLogger", "TensorBoard", "RemoteMonitor")
"""Callbacks of Keras that write or show, and decide nothing: the main worker alone calls them."""

DERIVED = ("min_delta", "monitor_op")
"""Attributes that a callback which watches a metric sets anew from its settings."""

OF_KERAS = ("_model", "params", "model")
"""Attributes that Keras sets."""

IsMain = Callable[[], bool]


def state_of(callback: Any) -> KeptAttributes:
    """The state of a callback that all workers call, which has heard that the training begins."""
    return KeptAttributes(callback, (*OF_KERAS, *(DERIVED if isinstance(callback, MonitorCallback) else ())))


class OnMain(KerasCallback):  # type: ignore[misc]  # Keras has no types
    """Calls a callback on the main worker alone, from where this worker becomes the main one.

    It gets the model then: some write as soon as they have it.

    Args:
        inner: the callback; None for none.
        trains: whether it hears of a training, and not of an evaluation alone.
    """

    def __init__(self, inner: Any, is_main: IsMain, *, trains: bool) -> None:
        super().__init__()
        self.inner, self._is_main, self._trains = inner, is_main, trains
        self._has_begun = False
        self._epoch: int | None = None
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called when an epoch begins."""
        self._epoch = epoch
        self._notify("on_epoch_begin", epoch, logs, is_new=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called when an epoch is over."""
        self._epoch = epoch
        self._notify("on_epoch_end", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Called when a step begins."""
        self._notify("on_train_batch_begin", batch, logs)
        self._steps += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called when a step is done."""
        self._notify("on_train_batch_end", batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Called when an evaluation begins."""
        self._notify("on_test_begin", logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Called when a batch is about to be evaluated."""
        self._notify("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called when all batches up to this one are evaluated."""
        self._notify("on_test_batch_end", batch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Called when an evaluation is over."""
        self._notify("on_test_end", logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Called when the training is over."""
        if self._has_begun:
            self._notify("on_train_end", logs)

    def stands_at(self, epoch: int, steps: int) -> None:
        """Note that the training is in an epoch, behind so many steps of it."""
        self._epoch, self._steps = epoch, steps

    def _notify(self, event: str, *values: Any, is_new: bool = False) -> None:
        if self.inner is None or not self._is_main():
            return
        if not self._has_begun:
            self._begin(is_new=is_new)
        getattr(self.inner, event)(*values)
        if _is_tensor_board(self.inner) and (event == "on_epoch_end" or self.inner.update_freq != "epoch"):
            for writer in self.inner._writers.values():  # what it keeps back would be lost with this worker
                writer.flush()

    def _begin(self, *, is_new: bool) -> None:
        """Call the callback's hooks for everything that has begun without it."""
        self._has_begun = True
        self.inner.set_params(self.params)
        self.inner.set_model(self._model)
        if not self._trains:
            return
        if isinstance(self.inner, keras.callbacks.CSVLogger) and self._epoch:
            self.inner.append = True
            cut_rows(Path(self.inner.filename), self._epoch, self.inner.sep)
        self.inner.on_train_begin()
        if _is_tensor_board(self.inner):
            self.inner._global_train_batch = self._steps
            self.inner._pop_writer()
            self.inner._push_writer(self.inner._train_writer, self._steps)
        if self._epoch is not None and not is_new:
            self.inner.on_epoch_begin(self._epoch)


def cut_rows(path: Path, epoch: int, separator: str) -> None:
    """Leave the rows of earlier epochs in a CSV file: this one, and what follows, are written anew."""
    if not path.is_file():
        return
    with path.open(newline="") as file:
        rows = list(csv.reader(file, delimiter=separator))
    kept = rows[:1] + [row for row in rows[1:] if row and row[0].isdigit() and int(row[0]) < epoch]
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(kept)


class Saving:
    """A model as a ``ModelCheckpoint`` sees it: only the main worker's saves write, and a file is whole or absent."""

    def __init__(self, model: Any, is_main: IsMain) -> None:
        self._model, self._is_main = model, is_main

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: Any, **options: Any) -> None:
        """Save the model on the main worker."""
        self._write(self._model.save, filepath, options)

    def save_weights(self, filepath: Any, **options: Any) -> None:
        """Save the weights on the main worker."""
        self._write(self._model.save_weights, filepath, options)

    def _write(self, save: Callable[..., None], filepath: Any, options: dict[str, Any]) -> None:
        if not self._is_main():
            return
        path = Path(filepath)
        if path.suffix not in (".keras", ".h5"):  # a folder, or an address
            save(filepath, **options)
            return
        part = path.with_name(f"part-of-{path.name}")  # Keras goes by how a name ends
        save(part, **options)
        part.replace(path)


def listed(callbacks: Any, model: Any, is_main: IsMain, verbose: Any, *, trains: bool = False, **params: Any) -> Any:
    """Keras' list of callbacks, with those that write on the main worker alone.

    ``verbose`` is 0 for no progress bar. ``trains`` says that they are called in a training, and not in an evaluation
    alone. ``params`` are those that Keras gives to callbacks.

    Raises:
        JobError: a callback keeps checkpoints of its own, by which Keras would begin anew.
    """
    chosen = [] if callbacks is None else keras.tree.flatten(callbacks)
    for callback in chosen:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise JobError(refused("keras.backup-and-restore"))
    shown = [callback for callback in chosen if type(callback).__name__ == "ProgbarLogger"]
    if not shown:
        chosen.append(keras.callbacks.ProgbarLogger() if verbose else None)
    wrapped = [
        OnMain(callback, is_main, trains=trains) if callback is None or _writes(callback) else callback
        for callback in chosen
    ]
    # The progress bar comes last, behind the history, as in Keras.
    history = next((callback for callback in wrapped if isinstance(callback, keras.callbacks.History)), None)
    if history is None:
        wrapped.insert(len(wrapped) - (not shown), keras.callbacks.History())
    callbacks = keras.callbacks.CallbackList(wrapped, add_history=True, model=model, verbose=verbose, **params)
    for callback in callbacks.callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            callback.set_model(Saving(model, is_main))
    return callbacks


def _writes(callback: Any) -> bool:
    return any(kind.__module__.startswith("keras.") and kind.__name__ in WRITERS for kind in type(callback).__mro__)


def _is_tensor_board(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.TensorBoard)


class LearningRateWarmup(KerasCallback):  # type: ignore[misc]  # Keras has no types
    """Lets the learning rate grow, step by step, to the one with which the optimizer was compiled.

    It takes part in checkpoints, and workers that join go on with it.

    Args:
        steps: the number of steps until the goal is reached.

    Raises:
        JobError: it is no whole number, or below 1.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        if not isinstance(steps, int) or steps < 1:  # type: ignore[redundant-expr]  # scripts may be unchecked
            raise JobError(f"LearningRateWarmup({steps!r}): needs a whole number of steps, at least 1")
        self.steps = steps
        self.done = 0
        self.goal: float | None = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of the step."""
        if self.done >= self.steps:
            return
        optimizer = self.model.optimizer
        if self.goal is None:
            self.goal = float(optimizer.learning_rate)
        self.done += 1
        optimizer.learning_rate = self.goal * self.done / self.steps


Validate = Callable[[int], Mapping[str, float]]
"""Given an epoch, evaluates if it is time; returns the values by name."""


@dataclass
class Fitting:
    """Where a ``fit`` stands.

    Attributes:
        steps: the most steps of an epoch, which the end of the data also ends; None for a pass over the data.
        data: the data that it trains with, and those that are held out.
        is_here: whether this worker takes part, or goes on where it was; not if the run is behind it.
        has_state: whether this worker has taken part, or has the state.
    """

    model: Any
    callbacks: Any
    epochs: range
    steps: int | None
    validate: Validate
    data: tuple[KerasData, KerasData | None]
    logs: dict[str, Any] = field(default_factory=dict)
    is_here: bool = field(default=False, init=False)
    has_state: bool = field(default=False, init=False)
    _epoch: int = -1
    _batch: int = 0
    _done: int = 0
    _over: int = 0  # epochs
    _has_started: bool = False
    _has_run_out: bool = False  # of data, and said so
    _has_ended: bool = False
    _positions: list[int] = field(init=False)  # of generators, where the next batch of each pass comes from
    _tracker: LossTracker = field(init=False)
    _kept: KeptCallbacks = field(default_factory=lambda: KeptCallbacks("fit", (), "keras"))

    def __post_init__(self) -> None:
        self._tracker = LossTracker(self.model)
        self._positions = [data.position for data in self._read]

    def begin(self) -> None:
        """Begin the training, or go on at the place of the other workers."""
        self.model.stop_training = False
        if self.epochs:
            self._turn()
        self.callbacks.on_train_begin()
        states = (state_of(callback) for callback in self.callbacks.callbacks if not isinstance(callback, OnMain))
        self._kept = KeptCallbacks("fit", states, "keras")

    def step_begins(self, step: Step) -> None:
        """Begin the step of a global batch."""
        epoch = self.epochs[self._over]
        is_new = self._epoch != epoch
        for callback in self.callbacks.callbacks:
            if isinstance(callback, OnMain) and (is_new or not self._has_started):
                callback.stands_at(epoch, self._done)
        if is_new:
            self._epoch, self._batch = epoch, 0
            self.model.reset_metrics()
            self.callbacks.on_epoch_begin(epoch)
            self.model.train()
        elif not self._has_started:
            self.model.train()
        self.is_here = self.has_state = self._has_started = True
        self._tracker.step_begins()
        self.callbacks.on_train_batch_begin(self._batch)

    def step_ends(self, step: Step, vectors: Mapping[str, Any]) -> bool:
        """End the step, which is computed. Return whether the training is to end here.

        ``vectors`` are what ``train_step`` logs beside numbers.
        """
        self._tracker.step_ends(step.loss, step.size)
        self.logs = {**results_of(self.model), **logged(step), **vectors}
        self.callbacks.on_train_batch_end(self._batch, self.logs)
        self._batch, self._done = self._batch + 1, self._done + 1
        is_last = step.is_last_in_epoch or self._batch == self.steps
        self._over += is_last
        if is_last or self.model.stop_training:
            self._epoch_ends()
        return bool(self.model.stop_training) or self._over == len(self.epochs)

    def has_no_number(self) -> bool:
        """Note that the loss of the step is not finite. Return whether a callback of Keras ends the training for it."""
        if not any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in self.callbacks.callbacks):
            return False
        self.logs = {**results_of(self.model), "loss": nan}
        self.callbacks.on_train_batch_end(self._batch, self.logs)
        self._epoch_ends()
        return True

    def _epoch_ends(self) -> None:
        is_short = self.steps and self._batch < self.steps and not self.data[0].is_read_once
        if is_short and not (self.model.stop_training or self._has_run_out):
            self._has_run_out = True
            warn(refused("keras.ran-out", epoch=self._epoch, steps=self._batch, asked=self.steps))
        self.model.eval()
        self._turn()
        self.logs = {**self.logs, **self.validate(self._epoch)}
        self._positions = [data.position for data in self._read]
        self.callbacks.on_epoch_end(self._epoch, self.logs)
        if not self.model.stop_training and self._epoch != self.epochs[-1]:
            self._turn()

    def _turn(self) -> None:
        """Begin or end an epoch of the data: before its first batch is read, and behind its last one."""
        if (epochs := self.data[0].epochs) is not None:
            epochs.turn()

    def end(self) -> Any:
        """End the training, and return the history."""
        if self.is_here:  # a run that resumes behind this training has weights of later steps
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)
        self._has_ended = True
        self.data[0].go_to(self._positions[0] + self._done)
        if (
            self.is_here
            and self.data[0].is_read_once
            and not (self.model.stop_training or self._over == len(self.epochs))
        ):
            warn(refused("keras.generator-ended", epochs=self._over, asked=len(self.epochs)))
        self.callbacks.on_train_end(self.logs)
        return self.model.history

    @property
    def _read(self) -> list[KerasData]:
        return [data for data in self.data if data is not None]

    def state(self) -> dict[str, Any]:
        """Return the state that a worker needs to go on here."""
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "done": self._done,
            "over": self._over,
            "data": [0 if data.epochs is None else data.epochs.turns for data in self._read],
            "positions": list(self._positions),
            "stops": bool(self.model.stop_training),
            "logs": dict(self.logs),
            "callbacks": self._kept.state(),
        }

    def outline(self) -> dict[str, Any]:
        """Return the state for a worker that has missed the training: all but the arrays that callbacks keep."""
        return {**self.state(), "callbacks": self._kept.outline()}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Set the state of a training, and go on there."""
        self.load(state)
        self.is_here = True

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the state of a training.

        Raises:
            CheckpointError: the state is of other callbacks.
        """
        self._kept.require_alike(state["callbacks"])
        self._epoch, self._batch = state["epoch"], state["batch"]
        self._done, self._over = state["done"], state["over"]
        self.logs = dict(state["logs"])
        self.model.stop_training = state["stops"]
        self.has_state = True
        self._positions = list(state["positions"])
        for data, turns, position in zip(self._read, state["data"], self._positions, strict=True):
            if not self._has_ended:  # else the script may have read a generator on since
                data.go_to(position)
            if data.epochs is not None:
                data.epochs.go_on(turns)
        self._kept.load(state["callbacks"])


@dataclass
class OneBatch:
    """A call of ``train_on_batch``.

    Attributes:
        note: a function that notes what it returns, before a checkpoint of its step is written.
        logs: what it returns; None if this worker has not made its step.
    """

    model: Any
    note: Callable[[dict[str, Any]], None]
    logs: dict[str, Any] | None = None

    def step_begins(self, step: Step) -> None:
        """Begin its step."""
        self.model.train()

    def step_ends(self, step: Step, vectors: Mapping[str, Any]) -> bool:
        """End its step. ``vectors`` are what ``train_step`` logs beside numbers."""
        self.logs = {**results_of(self.model), **logged(step), **vectors}
        self.note(self.logs)
        return False

    def has_no_number(self) -> bool:
        """Return whether a loss that is not finite ends the training by itself: never."""
        return False


def logged(step: Step) -> dict[str, float]:
    """What ``train_step`` has logged besides the results of metrics."""
    return {name.removeprefix(PREFIX): value for name, value in step.metrics.items() if name.startswith(PREFIX)}
