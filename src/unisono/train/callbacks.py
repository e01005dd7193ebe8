"""Hooks into :class:`~unisono.train.trainer.Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.train.history import EpochRecord, History
    from unisono.train.step import Step
    from unisono.train.trainer import Trainer


class Callback:
    """Override what you need. Every worker calls every hook; print and write on ``trainer.run.is_main`` alone."""

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Before the first step."""

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """Before the first step of an epoch."""

    def on_step_end(self, trainer: Trainer, step: Step, loss: float) -> None:
        """After a step is committed."""

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        """After an epoch and its validation; ``trainer.stop()`` ends the training here."""

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """After the last step."""
