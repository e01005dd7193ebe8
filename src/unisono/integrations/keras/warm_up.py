"""A learning rate that grows to its goal in the first steps."""

from __future__ import annotations

from typing import Any

from keras.callbacks import Callback as KerasCallback

from unisono.errors import JobError


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
