"""Callbacks on several workers: Keras' own and who calls them, and a warm-up of the learning rate."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from keras.callbacks import Callback as KerasCallback
from keras.src.callbacks.monitor_callback import MonitorCallback

from unisono.errors import JobError
from unisono.integrations.kept_attributes import KeptAttributes
from unisono.integrations.refused import refused

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
        is_main: whether this is the main worker now.
        trains: whether it hears of a training, and not of an evaluation alone.
    """

    def __init__(self, inner: Any, is_main: IsMain, *, trains: bool) -> None:
        super().__init__()
        self.inner, self._is_main, self._trains = inner, is_main, trains
        self._has_begun = False
        self._epoch: int | None = None
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        self._tell("on_epoch_begin", epoch, logs, epoch=epoch, is_new=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """An epoch is over."""
        self._tell("on_epoch_end", epoch, logs, epoch=epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step begins."""
        self._tell("on_train_batch_begin", batch, logs)
        self._steps += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A step is done."""
        self._tell("on_train_batch_end", batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """An evaluation begins."""
        self._tell("on_test_begin", logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A batch is about to be evaluated."""
        self._tell("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """All batches up to this one are evaluated."""
        self._tell("on_test_batch_end", batch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        """An evaluation is over."""
        self._tell("on_test_end", logs)

    def on_train_end(self, logs: Any = None) -> None:
        """The training is over."""
        if self._has_begun:
            self._tell("on_train_end", logs)

    def stands_at(self, epoch: int, steps: int) -> None:
        """The training is in an epoch, behind so many steps of it."""
        self._epoch, self._steps = epoch, steps

    def _tell(self, event: str, *values: Any, epoch: int | None = None, is_new: bool = False) -> None:
        self._epoch = self._epoch if epoch is None else epoch
        if self.inner is None or not self._is_main():
            return
        if not self._has_begun:
            self._begin(is_new=is_new)
        getattr(self.inner, event)(*values)
        if _is_tensor_board(self.inner) and (event == "on_epoch_end" or self.inner.update_freq != "epoch"):
            for writer in self.inner._writers.values():  # what it keeps back would be lost with this worker
                writer.flush()

    def _begin(self, *, is_new: bool) -> None:
        """The callback hears of what has begun without it."""
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
    """A model as a ``ModelCheckpoint`` sees it: only the main worker's saves write, and a file is whole or not there.

    Args:
        model: the model.
        is_main: whether this is the main worker now.
    """

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


def listed(given: Any, model: Any, is_main: IsMain, verbose: Any, *, trains: bool = False, **params: Any) -> Any:
    """Keras' list of callbacks, with those that write on the main worker alone.

    Args:
        given: what ``fit`` was given: a callback, a list of them, or None.
        model: the model.
        is_main: whether this is the main worker now.
        verbose: 0 for no progress bar.
        trains: whether they hear of a training, and not of an evaluation alone.
        params: what Keras tells callbacks.

    Raises:
        JobError: a callback keeps checkpoints of its own, by which Keras would begin anew.
    """
    chosen = [] if given is None else keras.tree.flatten(given)
    for one in chosen:
        if isinstance(one, keras.callbacks.BackupAndRestore):
            raise JobError(refused("keras.backup-and-restore"))
    shown = [one for one in chosen if type(one).__name__ == "ProgbarLogger"]
    if not shown:
        chosen.append(keras.callbacks.ProgbarLogger() if verbose else None)
    wrapped = [OnMain(one, is_main, trains=trains) if one is None or _writes(one) else one for one in chosen]
    # The progress bar comes last, behind the history, as in Keras.
    history = next((one for one in wrapped if isinstance(one, keras.callbacks.History)), None)
    if history is None:
        wrapped.insert(len(wrapped) - (not shown), keras.callbacks.History())
    found = keras.callbacks.CallbackList(wrapped, add_history=True, model=model, verbose=verbose, **params)
    for one in found.callbacks:
        if isinstance(one, keras.callbacks.ModelCheckpoint):
            one.set_model(Saving(model, is_main))
    return found


def _writes(callback: Any) -> bool:
    return any(kind.__module__.startswith("keras.") and kind.__name__ in WRITERS for kind in type(callback).__mro__)


def _is_tensor_board(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.TensorBoard)


class LearningRateWarmup(KerasCallback):  # type: ignore[misc]  # Keras has no types
    """Lets the learning rate grow, step by step, to what the optimizer was compiled with.

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
