"""What computed samples came to, added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sums:
    """Of parts of the work that one worker computed one after the other.

    Attributes:
        samples: that were computed.
        loss: the sum of their losses.
        metrics: the sums of what the loss functions logged, over the same samples.
        seconds: by what they went into.
    """

    samples: int = 0
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, samples: int, loss: float, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """One more part, with its samples' mean loss and metrics."""
        self.samples += samples
        self.loss += loss * samples
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * samples
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def mean_loss(self, otherwise: float) -> float:
        """Of a sample; where none was computed, something else."""
        return self.loss / self.samples if self.samples else otherwise

    @property
    def mean_metrics(self) -> dict[str, float]:
        """Of a sample."""
        return {name: value / self.samples for name, value in self.metrics.items()}
