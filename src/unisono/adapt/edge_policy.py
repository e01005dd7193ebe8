"""A learning rate that follows the curvature of the loss."""

from __future__ import annotations

import math

from unisono.adapt.policy import Policy
from unisono.adapt.view import View
from unisono.arguments import require_kinds
from unisono.errors import JobError


class EdgeOfStability(Policy):
    """Keeps the learning rate at a share of what the critical sharpness allows. Experimental.

    It is measured before the update of every so many steps. A script may measure it instead, with
    ``run.curvature(loss_fn)`` before ``step.run``.

    With the sharpness λ the loss would rise from a learning rate of 2/λ on, so the next one is share · 2/λ. It falls
    at once, and rises by a factor of ``growth`` per measurement at most, which is its warm-up.

    Args:
        share: the share of the critical learning rate, above 0.
        growth: the largest factor by which it rises at a time, above 1.
        every: steps from one measurement to the next, unless ``Monitoring(curvature_every=…)`` says otherwise; 0 leaves
            them to the script.

    Raises:
        JobError: a setting is of another type, or out of range.
    """

    def __init__(self, share: float = 0.5, growth: float = 2.0, every: int = 10) -> None:
        require_kinds(EdgeOfStability.__init__, locals())
        if not 0 < share < math.inf or not 1 < growth < math.inf or every < 0:
            raise JobError(
                f"EdgeOfStability(share={share}, growth={growth}, every={every}): share above 0, growth above 1, every "
                f"from 0 on"
            )
        self._share, self._growth, self._every = share, growth, every

    @property
    def curvature_every(self) -> int:  # type: ignore[override]
        """Steps from one measurement to the next."""
        return self._every

    def after_step(self, view: View) -> None:
        """Follow a new measurement, if the step's line has one."""
        sharpness = view.metrics.get("critical_sharpness")
        if not isinstance(sharpness, int | float) or not math.isfinite(sharpness) or sharpness <= 0:
            return
        wanted = min(self._share * 2 / sharpness, self._growth * view.learning_rate)
        if wanted != view.learning_rate:
            self.set_learning_rate(wanted, critical_sharpness=sharpness, before=view.learning_rate)
