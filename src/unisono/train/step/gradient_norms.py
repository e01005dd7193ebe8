"""Parts of a step that use norms of gradients: clipping, and the measurement of noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

from torch import Tensor

from unisono.adapt.norms import GradientNorms, Monitoring
from unisono.device import HostRead
from unisono.train.state.trained import Trained
from unisono.train.step.part import Attempt, Part


class Clipping(Part):
    """Limits the gradient's norm and values, see :class:`~unisono.train.step.step.Clip`.

    ``norm_of`` returns the norm of all gradients together.
    """

    writes_gradient = True

    def __init__(self, norm_of: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self._norm_of = norm_of
        self._norm: HostRead | None = None

    def gradient(self, attempt: Attempt) -> None:
        """Limit the gradient, without waiting for its norm."""
        norm = attempt.call.clip.apply(attempt.gradients.trained, self._norm_of)
        self._norm = None if norm is None else HostRead(norm)

    def refuse(self, attempt: Attempt) -> str:
        """Refuse a gradient whose norm is not finite."""
        norm = 0.0 if self._norm is None else float(self._norm.values())
        return "" if math.isfinite(norm) else f"the norm of the gradient is {norm}"


class NoiseMonitor(Part):
    """Measures the norms of the shards' gradients and of their mean."""

    def __init__(self, monitoring: Monitoring, trained: Trained) -> None:
        self._monitoring, self._trained = monitoring, trained

    def attempt(self, attempt: Attempt) -> None:
        """Have the norms of the shards' gradients measured, if the step is watched."""
        call = attempt.call
        attempt.gradients.watch(call.step if self._monitoring.watches(call.step, call.number) else None)

    def gradient(self, attempt: Attempt) -> None:
        """Measure the norm of the mean gradient. Collective."""
        if not attempt.gradients.is_watched:
            return
        batch, shards = attempt.call.batch, attempt.report.shards
        measured = [(part, batch.shard(shard)) for shard, part in enumerate(shards) if part.weight]
        attempt.norms = GradientNorms(
            groups=[part.squared_norm for part, _ in measured],
            sizes=[len(samples) for _, samples in measured],
            mean=attempt.gradients.mean_squared_norm(),
        )

    def done(self, attempt: Attempt) -> None:
        """Add the norms to the figures of the step."""
        if attempt.norms is not None:
            losses = [part.loss for part in attempt.report.shards if part.weight]
            attempt.figures |= self._trained.monitors.see(attempt.call.step, attempt.norms, losses)
            if not self._trained.policy_state.is_empty:
                attempt.figures["norms"] = asdict(attempt.norms)
