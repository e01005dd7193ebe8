"""One ``fit``: its epochs and batches as callbacks hear of them, and what of it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import CheckpointError
from unisono.integrations.kept_attributes import KeptAttributes
from unisono.integrations.keras.batches import DataEpochs
from unisono.integrations.keras.callbacks import OnMain, state_of
from unisono.integrations.keras.shard_step import PREFIX, LossTracker
from unisono.integrations.keras.variables import results_of
from unisono.train.step.step import Step

Validate = Callable[[int], Mapping[str, float]]
"""Given an epoch, evaluates if it is time; returns the values by name."""


@dataclass
class Fitting:
    """Where a ``fit`` stands.

    Attributes:
        model: the Keras model.
        callbacks: Keras' list of callbacks.
        epochs: the numbers of the epochs.
        steps: the number of steps in an epoch; None for those of a pass over the data.
        validate: what evaluates at the end of an epoch.
        data: the epochs of the data that it trains with, and of those that are held out, if they change between them.
        logs: the newest values of all metrics.
        is_here: whether this worker takes part, or goes on where it was; not if the run is behind it.
        knows: whether this worker has taken part, or has the state.
    """

    model: Any
    callbacks: Any
    epochs: range
    steps: int | None
    validate: Validate
    data: tuple[DataEpochs | None, DataEpochs | None] = (None, None)
    logs: dict[str, float] = field(default_factory=dict)
    is_here: bool = field(default=False, init=False)
    knows: bool = field(default=False, init=False)
    _epoch: int = -1
    _batch: int = 0
    _done: int = 0
    _is_told: bool = False
    _tracker: LossTracker = field(init=False)
    _kept: list[KeptAttributes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tracker = LossTracker(self.model)

    def begin(self) -> None:
        """The training begins, or goes on where others are."""
        self.model.stop_training = False
        if self.epochs:
            self._turn()
        self.callbacks.on_train_begin()
        self._kept = [state_of(one) for one in self.callbacks.callbacks if not isinstance(one, OnMain)]
        for one in self._kept:
            one.warn("keras")

    def step_begins(self, step: Step) -> None:
        """A global batch is about to be computed."""
        epoch = self.epochs[self._done // self.steps if self.steps else step.epoch]
        is_new = self._epoch != epoch
        for one in self.callbacks.callbacks:
            if isinstance(one, OnMain) and (is_new or not self._is_told):
                one.stands_at(epoch, self._done)
        if is_new:
            self._epoch, self._batch = epoch, 0
            self.model.reset_metrics()
            self.callbacks.on_epoch_begin(epoch)
            self.model.train()
        elif not self._is_told:
            self.model.train()
        self.is_here = self.knows = self._is_told = True
        self._tracker.step_begins()
        self.callbacks.on_train_batch_begin(self._batch)

    def step_ends(self, step: Step) -> bool:
        """It is computed.

        Returns:
            whether the training is to end here.
        """
        self._tracker.step_ends(step.loss, step.size)
        values = {name.removeprefix(PREFIX): one for name, one in step.metrics.items() if name.startswith(PREFIX)}
        self.logs = {**results_of(self.model), **values}
        self.callbacks.on_train_batch_end(self._batch, self.logs)
        self._batch, self._done = self._batch + 1, self._done + 1
        is_last = self._done % self.steps == 0 if self.steps else step.is_last_in_epoch
        if is_last or self.model.stop_training:
            self._epoch_ends()
        return bool(self.model.stop_training) or self._done == (self.steps or 0) * len(self.epochs)

    def _epoch_ends(self) -> None:
        self.model.eval()
        self._turn()
        self.logs = {**self.logs, **self.validate(self._epoch)}
        self.callbacks.on_epoch_end(self._epoch, self.logs)
        if not self.model.stop_training and self._epoch != self.epochs[-1]:
            self._turn()

    def _turn(self) -> None:
        """An epoch of the data begins or ends: before its first batch is read, and behind its last one."""
        if self.data[0] is not None:
            self.data[0].turn()

    def end(self) -> Any:
        """The training is over.

        Returns:
            the history.
        """
        if self.is_here:  # a run that resumes behind this training has weights of later steps
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)
        self.callbacks.on_train_end(self.logs)
        return self.model.history

    def state(self) -> dict[str, Any]:
        """What a worker needs that goes on here."""
        told = [[type(one.thing).__name__, one.state()] for one in self._kept]
        place = {"epoch": self._epoch, "batch": self._batch, "done": self._done}
        heard = [0 if one is None else one.told for one in self.data]
        return {
            **place,
            "data": heard,
            "stops": bool(self.model.stop_training),
            "logs": dict(self.logs),
            "callbacks": told,
        }

    def outline(self) -> dict[str, Any]:
        """What a worker needs that has missed it: all but the arrays that callbacks keep."""
        return {**self.state(), "callbacks": [[type(one.thing).__name__, one.outline()] for one in self._kept]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Stand where it was.

        Raises:
            CheckpointError: it was with other callbacks.
        """
        here, there = [type(one.thing).__name__ for one in self._kept], [name for name, _ in state["callbacks"]]
        if here != there:
            raise CheckpointError(f"fit has the callbacks {', '.join(here)}, and its state is of {', '.join(there)}")
        self._epoch, self._batch, self._done = state["epoch"], state["batch"], state["done"]
        self.logs = dict(state["logs"])
        self.model.stop_training = state["stops"]
        self.knows = True
        for data, heard in zip(self.data, state["data"], strict=True):
            if data is not None:
                data.go_on(heard)
        for one, (_, kept) in zip(self._kept, state["callbacks"], strict=True):
            if kept is not None:
                one.load(kept)
