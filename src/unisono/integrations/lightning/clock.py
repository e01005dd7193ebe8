"""Validations at intervals of time: the main worker's clock decides for all workers."""

from __future__ import annotations

import time
from typing import Any

from unisono.integrations.lightning.framework import part

_TrainingEpochLoop: Any = part("loops.training_epoch_loop")._TrainingEpochLoop


class ByMainClock(_TrainingEpochLoop):  # type: ignore[misc]  # Lightning is not looked into by mypy
    """Lightning's loop of an epoch, which validates when the main worker's clock says so."""

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """Decide whether to validate now. Collective, behind a step."""
        is_due = bool(super()._should_check_val_fx(data_fetcher))
        if not self._should_check_val_epoch():
            return is_due
        strategy, trainer = self.trainer.strategy, self.trainer
        if not strategy.may_ask:  # a checkpoint of Lightning's goes on, before any step
            return bool(self.val_loop.restarted_mid_evaluation)
        is_due, seconds = strategy.run.broadcast([is_due, time.monotonic() - trainer._last_val_time])
        set_waited(trainer, 0.0 if is_due else seconds)
        return bool(is_due)


def waited(trainer: Any) -> float | None:
    """The seconds that the main worker had waited for a validation when it last decided; None without a clock."""
    return getattr(trainer.fit_loop.epoch_loop, "waited", None)


def set_waited(trainer: Any, seconds: float) -> None:
    """Go on from there: this worker may be the main one later, or is it in a run that resumes."""
    trainer.fit_loop.epoch_loop.waited = seconds
    trainer._last_val_time = time.monotonic() - seconds


def decide_by_main_clock(trainer: Any) -> None:
    """Have a trainer whose validations go by a clock ask the main worker."""
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        trainer.fit_loop.epoch_loop.__class__ = ByMainClock
