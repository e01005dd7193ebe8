"""Training with ``fit`` instead of a loop: a thin layer on the methods of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from unisono.arguments import require_parameters, require_types
from unisono.errors import JobError
from unisono.settings.reading import require_current_names
from unisono.train.loop.evaluation import Metrics, Predict
from unisono.train.record.progress import Display, EpochRecord, History, Lines, display_of
from unisono.train.run import Run
from unisono.train.start import init
from unisono.train.state.registry import Attribute
from unisono.train.step.step import Clip, LossFunction, Step


@dataclass(frozen=True, slots=True)
class Scheduling:
    """A learning-rate scheduler, and how often it advances."""

    scheduler: Any
    every: str

    @property
    def watches(self) -> bool:
        """Whether the scheduler follows a metric, which is known at the end of an epoch."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def after_step(self, step: Step) -> None:
        """Call the scheduler's ``step``, if it is time."""
        if self.scheduler is not None and not self.watches and (self.every == "step" or step.is_last_in_epoch):
            self.scheduler.step()

    def after_epoch(self, record: EpochRecord) -> None:
        """Give the scheduler the validation loss, or the training loss where there is no validation."""
        if self.watches:
            self.scheduler.step(record.validation.get("validation loss", record.loss))


@dataclass
class EpochSums:
    """The sums over the present epoch. Checkpoints hold them, since schedules and callbacks decide by them.

    Attributes:
        place: the loop and the epoch of the sums.
        skipped: the number of steps that updated nothing.
        stops: whether the training is to end after the epoch.
    """

    place: tuple[int, int] = (-1, -1)
    samples: int = 0
    skipped: int = 0
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    stops: bool = False

    def begin(self, place: tuple[int, int]) -> None:
        """Prepare for a step of an epoch. Sums of another epoch are dropped."""
        if place != self.place:
            self.place, self.samples, self.skipped, self.loss, self.metrics = place, 0, 0, 0.0, {}

    def add(self, step: Step, loss: float, metrics: Mapping[str, float]) -> None:
        """Add a committed step."""
        if step.is_skipped or math.isnan(loss):
            self.skipped += 1
            return
        self.samples += step.size
        self.loss += loss * step.size
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * step.size

    def record(self, pace: _Pace) -> EpochRecord:
        """Return the record of the epoch, which is over."""
        means = {name: total / self.samples for name, total in self.metrics.items()}
        loss = self.loss / self.samples if self.samples else math.nan
        return EpochRecord(pace.epoch, loss, means, {}, pace.seconds, pace.rate, self.skipped)


@dataclass(slots=True)
class _Pace:
    """The pace at which this process computes an epoch, or the rest of one."""

    epoch: int
    begun: float = field(default_factory=perf_counter)
    samples: int = 0

    @property
    def seconds(self) -> float:
        return perf_counter() - self.begun

    @property
    def rate(self) -> float:
        return self.samples / max(self.seconds, 1e-9)


class Callback:
    """Hooks into a :class:`Trainer`: override what you need.

    Every worker calls every hook; print and write only where ``trainer.run.is_main``.
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Called before the first step."""

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """Called before the first step of an epoch."""

    def on_step_end(self, trainer: Trainer, step: Step, loss: float) -> None:
        """Called after a step is committed."""

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        """Called after an epoch and its validation; ``trainer.stop()`` ends the training here."""

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Called after the last step."""


class Trainer:
    """Trains a model on any number of workers.

    ::

        trainer = unisono.Trainer(model, optimizer, loss_fn, batch_size=128, seed=0)
        history = trainer.fit(train_set, epochs=5, validation=test_set)

    Build the model after seeding, or pass ``run=unisono.init(...)`` made before it: a model built before its seed is
    set starts from other weights in every run.

    Args:
        model: a module, or a list of them.
        optimizer: an optimizer, or a list of them.
        loss_fn: the loss function, as of :meth:`unisono.Step.run`.
        batch_size: the number of samples in one global batch; needed unless ``run`` is given.
        metrics: the metrics of the validation, as of :meth:`unisono.Run.evaluate`; by default the loss.
        scheduler: a learning-rate scheduler of torch; ``ReduceLROnPlateau`` follows the validation loss, or the
            training loss where there is no validation.
        scheduler_every: ``epoch`` or ``step``.
        clip_norm: the largest global norm of the gradient.
        clip_value: the largest absolute value in the gradient.
        loader_workers: the number of processes that load ahead; a ``DataLoader`` decides it by itself.
        callbacks: the callbacks, called in this order.
        progress: whether the main worker shows a bar (in a terminal) or lines (elsewhere).
        run: an existing run, instead of settings for a new one.
        settings: the settings of :func:`unisono.init`.

    Raises:
        JobError: neither a batch size nor a run, or an argument that is unknown or of another type; names it.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: LossFunction,
        *,
        batch_size: int | None = None,
        metrics: Metrics | None = None,
        scheduler: Any = None,
        scheduler_every: Literal["epoch", "step"] = "epoch",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        loader_workers: int | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        run: Run | None = None,
        **settings: Any,
    ) -> None:
        require_types(Trainer.__init__, {**locals(), "model": (), "optimizer": ()})  # the run refuses these itself
        require_current_names(settings)
        require_parameters(init, settings)
        if run is not None and (settings or batch_size is not None):
            names = ", ".join([*settings, *(["batch_size"] if batch_size is not None else [])])
            raise JobError(f"Trainer(run=…, {names}=…): the settings come from the run: pass them to unisono.init")
        clip = Clip(clip_norm, clip_value)
        self.run = run or _started(batch_size, settings)
        self.model, self.optimizer = self.run.prepare(model, optimizer)
        self.callbacks = list(callbacks)
        self.history = History()
        self._loss_fn = loss_fn
        self._metrics = metrics or {"loss": loss_fn}
        self._scheduling = Scheduling(scheduler, scheduler_every)
        self._clip = clip
        self._loader_workers = loader_workers
        self._progress = progress
        self._sums = EpochSums()
        self.run.inside.trained.registry.add_own("trainer", Attribute(self, "_sums", EpochSums))
        if scheduler is not None:
            self.run.register("scheduler", scheduler)

    def fit(self, train: Any, epochs: int = 1, validation: Any = None, **loading: Any) -> History:
        """Train.

        Args:
            train: the data set to train on, or a ``DataLoader``.
            epochs: passes over it.
            validation: the data set to evaluate after each epoch; None for no validation.
            loading: further settings of :meth:`unisono.Run.steps`, such as ``drop_last`` or ``collate_fn``.

        Returns:
            a record per epoch that was trained here; a run that resumes has only what was left.
        """
        require_parameters(Run.steps, loading)
        first = len(self.history.epochs)
        if self._sums.place[0] != self.run.inside.trained.progress.loop:  # otherwise a resumed run goes on in this loop
            self._sums.stops = False
        display = display_of(lambda: self.run.is_main, Lines) if self._progress else Display()
        self._notify("on_fit_begin")
        try:
            self._train(train, epochs, validation, display, loading, first)
        finally:
            display.close()
        self._notify("on_fit_end", self.history)
        return self.history

    def evaluate(self, dataset: Any, metrics: Metrics | None = None) -> dict[str, float]:
        """Return the means of metrics over a data set; see :meth:`unisono.Run.evaluate`."""
        return self.run.evaluate(dataset, metrics or self._metrics)

    def predict(self, dataset: Any, predict_fn: Predict | None = None) -> Any:
        """Return the model's outputs for a data set, in its order; see :meth:`unisono.Run.predict`."""
        return self.run.predict(dataset, predict_fn)

    def finish(self) -> str:
        """End the run; see :meth:`unisono.Run.finish`."""
        return self.run.finish()

    def stop(self) -> None:
        """End the training after the epoch that is under way. Call it on every worker."""
        self._sums.stops = True

    def _train(
        self, train: Any, epochs: int, validation: Any, display: Display, loading: Mapping[str, Any], first: int
    ) -> None:
        pace: _Pace | None = None
        for step in self.run.steps(train, epochs, **{"loader_workers": self._loader_workers, **loading}):
            self._sums.begin((self.run.inside.trained.progress.loop, step.epoch))
            if pace is None or pace.epoch != step.epoch:  # a run that goes back may return to the epoch before
                pace = _Pace(step.epoch)
                display.begin(step.epoch, *self.run.inside.loop.place_of(step))
                self._notify("on_epoch_begin", step.epoch)
            loss = step.run(self._loss_fn, clip_norm=self._clip.norm, clip_value=self._clip.value)
            self._scheduling.after_step(step)
            self._sums.add(step, loss, step.metrics)
            pace.samples += step.size
            display.step(loss, pace.rate, self.run.world_size)
            self._notify("on_step_end", step, loss)
            if step.is_last_in_epoch:
                self._end(pace, validation, display, first)
                pace = None
                if self._sums.stops:
                    self._sums.stops = False
                    self.run.inside.loop.end_here()

    def _end(self, pace: _Pace, validation: Any, display: Display, first: int) -> None:
        trained = self._sums.record(pace)
        metrics = self.evaluate(validation) if validation is not None else {}
        record = replace(trained, validation={f"validation {name}": value for name, value in metrics.items()})
        # If the run has gone back, an epoch comes again, and its new record replaces the old one.
        self.history.epochs[first:] = [
            earlier for earlier in self.history.epochs[first:] if earlier.epoch < record.epoch
        ]
        self.history.epochs.append(record)
        self._scheduling.after_epoch(record)
        display.end(record)
        self._notify("on_epoch_end", record)

    def _notify(self, hook: str, *values: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *values)


def _started(batch_size: int | None, settings: Mapping[str, Any]) -> Run:
    if batch_size is None:
        raise JobError("Trainer needs batch_size=, the samples in one global batch, or run=unisono.init(...)")
    return init(batch_size=batch_size, **settings)
