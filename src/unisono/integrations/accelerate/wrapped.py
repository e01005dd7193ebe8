"""accelerate's own optimizers and gradient state, of which only the last turn of a step acts."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState

from unisono.errors import ModelError
from unisono.integrations.accelerate.bodies import Bodies


class StepState(GradientState):  # type: ignore[misc]  # accelerate is not looked into by mypy
    """Whether gradients are those of a whole step now, for one accelerator.

    Args:
        state: accelerate's own, of the process.
        bodies: the training loop's body.
    """

    def __init__(self, state: Any, bodies: Bodies) -> None:
        self._dataloader_references_ref = [None]
        self._is_xla_gradients_synced = False
        self.plugin_kwargs = dict(state.plugin_kwargs)
        self._bodies = bodies

    @property
    def sync_gradients(self) -> bool:
        """Whether the mean gradient of the step is there."""
        return self._bodies.is_last

    @property
    def adjust_scheduler(self) -> bool:
        """Schedulers count updates, however many turns a worker has in a step."""
        return False


class Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer that makes its step in the last turn of a step's body.

    Args:
        optimizer: the script's optimizer.
        state: whether gradients are those of a whole step.
        bodies: the training loop's body.
    """

    def __init__(self, optimizer: Any, state: StepState, bodies: Bodies) -> None:
        super().__init__(optimizer)
        self.gradient_state = state
        self._bodies = bodies

    def step(self, closure: Any = None) -> None:
        """Make the step, if this is the last turn.

        Raises:
            ModelError: there is a closure.
            JobError: outside of a training loop.
        """
        if closure is not None:
            raise ModelError("optimizer.step(closure): it would compute shards by itself; use an optimizer without one")
        if self._bodies.step():
            self.optimizer.step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the present step makes no update, since its loss or gradient is not finite."""
        return self._bodies.was_skipped
