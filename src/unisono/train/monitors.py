"""What is measured in a run's steps, over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from unisono.adapt.average import Average
from unisono.adapt.losses import loss_variance
from unisono.adapt.noise_average import NoiseAverage
from unisono.adapt.norms import GradientNorms

NAMES = ("gradient_norm", "gradient_variance", "noise_scale", "loss_variance")
"""In ``metrics.jsonl``, in steps that are watched."""


class Monitors:
    """Averages over the steps so far. They are the same on every worker, and for every number of workers.

    Attributes:
        noise: of the gradients.
    """

    def __init__(self) -> None:
        self.noise = NoiseAverage()

    def see(self, norms: GradientNorms, losses: Sequence[float]) -> dict[str, float]:
        """A step was committed.

        Args:
            norms: of its gradients.
            losses: of the same shards.

        Returns:
            what there is to say of it, by name, without what is not yet known.
        """
        self.noise = self.noise.after(norms)
        noise = self.noise.noise
        found = {
            "gradient_norm": math.sqrt(norms.mean),
            "gradient_variance": None if noise is None else noise.variance,
            "noise_scale": None if noise is None else noise.scale,
            "loss_variance": loss_variance(losses, norms.sizes),
        }
        return {name: value for name, value in found.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """The averages, as numbers by name."""
        return asdict(self.noise)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.noise = NoiseAverage(**{name: Average(**parts) for name, parts in state.items()})
